#include "../decode.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "gelu.h"
#include "simd.h"

namespace gptkernels::cpu {
namespace {

// As in layernorm.cpp, `rest`, the mean's rounding error, is subtracted after the mean. Without this, a constant row
// would give rest / sqrt(eps) instead of 0.
template <typename T, typename A>
void normalise(A* out, const A* x, const T* weight, const T* bias, int64_t width, double eps) {
  vectorised([&] {
    const A mean = sum<A>(width, [&](int64_t i) { return x[i]; }) / A(width);
    const Sums<A> sums = sum_two<A>(width, [&](int64_t i, A& rests, A& squares) {
      rests += x[i] - mean;
      squares += (x[i] - mean) * (x[i] - mean);
    });
    const A rest = sums.first / A(width);
    const A rstd = A(1) / std::sqrt(sums.second / A(width) - rest * rest + A(eps));
#pragma omp simd
    for (int64_t i = 0; i < width; ++i)
      out[i] = (x[i] - mean - rest) * rstd * A(weight[i]) + (bias ? A(bias[i]) : A(0));
  });
}

// Calls result(b, row, dot(x[b], weight[row]) + bias[row]), and reads each row of the weight from memory once.
template <typename T, typename A, typename Result>
void product(Stream stream, const A* x, int64_t batch, const T* weight, const T* bias, int64_t rows, int64_t inner,
             const Result& result) {
  parallel_for(stream, rows, inner * batch, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t row = begin; row < end; ++row) {
        const T* w = weight + row * inner;
        for (int64_t b = 0; b < batch; ++b) {
          const A total = sum<A>(inner, [&](int64_t i) { return x[b * inner + i] * A(w[i]); });
          result(b, row, total + (bias ? A(bias[row]) : A(0)));
        }
      }
    });
  });
}

template <typename T, typename A>
void attend(A* out, const A* query, const T* keys, const T* values, int64_t count, int64_t head_size) {
  const A scale = A(1) / std::sqrt(A(head_size));
  A largest = -std::numeric_limits<A>::infinity(), total = 0;
  std::fill_n(out, head_size, A(0));
  for (int64_t j = 0; j < count; ++j) {
    const T* key = keys + j * head_size;
    const T* value = values + j * head_size;
    const A score = scale * sum<A>(head_size, [&](int64_t i) { return query[i] * A(key[i]); });
    if (score > largest) {
      const A rescale = exp_nonpositive(largest - score);
      largest = score;
      total *= rescale;
#pragma omp simd
      for (int64_t i = 0; i < head_size; ++i) out[i] *= rescale;
    }
    const A weight = exp_nonpositive(score - largest);
    total += weight;
#pragma omp simd
    for (int64_t i = 0; i < head_size; ++i) out[i] += weight * A(value[i]);
  }
#pragma omp simd
  for (int64_t i = 0; i < head_size; ++i) out[i] /= total;
}

template <typename T>
int64_t token(const Decode<T>& p, int64_t b) {
  return p.sequences[b * p.sequence_length + p.lengths[b] - 1];
}

template <typename T>
class Step {
 public:
  using A = accumulate_t<T>;

  Step(const Decode<T>& p, Stream stream)
      : p_(p),
        stream_(stream),
        head_size_(p.width / p.heads),
        residual_(static_cast<A*>(p.workspace)),
        query_(residual_ + p.batch * p.width),
        attended_(query_ + p.batch * p.width),
        normalised_(attended_ + p.batch * p.width),
        hidden_(normalised_ + p.batch * p.width) {}

  void run() {
    for (int64_t b = 0; b < p_.batch; ++b)
      for (int64_t i = 0; i < p_.width; ++i)
        residual_[b * p_.width + i] = A(p_.wte[std::max<int64_t>(token(p_, b), 0) * p_.width + i]) +
                                      A(p_.wpe[(p_.lengths[b] - 1) * p_.width + i]);
    for (int64_t l = 0; l < p_.layer_count; ++l) layer(p_.layers[l], p_.keys_values + 2 * l * cache_size());
    normalise_all(p_.norm_weight, p_.norm_bias);
    product(stream_, normalised_, p_.batch, p_.lm_head, static_cast<const T*>(nullptr), p_.lm_head_rows, p_.width,
            [&](int64_t b, int64_t row, A sum) { store(p_.logits[b * p_.lm_head_rows + row], sum); });
  }

 private:
  int64_t cache_size() const { return p_.batch * p_.width * p_.capacity; }

  void layer(const DecodeLayer<T>& w, T* keys) {
    const int64_t B = p_.batch, C = p_.width;
    T* const values = keys + cache_size();
    normalise_all(w.norm_1_weight, w.norm_1_bias);
    product(stream_, normalised_, B, w.qkv_weight, w.qkv_bias, 3 * C, C, [&](int64_t b, int64_t row, A sum) {
      if (row < C)
        query_[b * C + row] = sum;
      else
        store((row < 2 * C ? keys : values)[place(b, row % C)], sum);
    });
    parallel_for(stream_, B * p_.heads, 2 * p_.capacity * head_size_, [&](int64_t begin, int64_t end) {
      vectorised([&] {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t first = row * p_.capacity * head_size_;
          attend(attended_ + row * head_size_, query_ + row * head_size_, keys + first, values + first,
                 p_.lengths[row / p_.heads], head_size_);
        }
      });
    });
    const auto add = [&](int64_t b, int64_t row, A sum) { residual_[b * C + row] += sum; };
    product(stream_, attended_, B, w.attn_proj_weight, w.attn_proj_bias, C, C, add);
    normalise_all(w.norm_2_weight, w.norm_2_bias);
    const bool tanh = p_.gelu == GeluForm::kTanh;
    product(stream_, normalised_, B, w.fc_weight, w.fc_bias, 4 * C, C, [&](int64_t b, int64_t row, A sum) {
      hidden_[b * 4 * C + row] = tanh ? GeluTanh::value(sum) : GeluErf::value(sum);
    });
    product(stream_, hidden_, B, w.mlp_proj_weight, w.mlp_proj_bias, C, 4 * C, add);
  }

  // Returns the offset of element 0 <= i < C of sequence b's newest key (or value) in the layer's cache.
  int64_t place(int64_t b, int64_t i) const {
    return ((b * p_.heads + i / head_size_) * p_.capacity + p_.lengths[b] - 1) * head_size_ + i % head_size_;
  }

  void normalise_all(const T* weight, const T* bias) {
    for (int64_t b = 0; b < p_.batch; ++b)
      normalise(normalised_ + b * p_.width, residual_ + b * p_.width, weight, bias, p_.width, p_.eps);
  }

  const Decode<T>& p_;
  Stream stream_;
  int64_t head_size_;
  A* residual_;    // (B, C)
  A* query_;       // (B, C)
  A* attended_;    // (B, C)
  A* normalised_;  // (B, C)
  A* hidden_;      // (B, 4C)
};

}  // namespace

template <typename T>
Status decode(const Decode<T>& p, Stream stream) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t most = std::min(p.capacity, p.sequence_length);
    if (p.lengths[b] < 1 || p.lengths[b] > most)
      return {"length " + std::to_string(p.lengths[b]) + " of sequence " + std::to_string(b) + " is not from 1 to " +
              std::to_string(most)};
    if (token(p, b) < -1 || token(p, b) >= p.vocabulary)
      return {"token " + std::to_string(token(p, b)) + " at position " + std::to_string(b) +
              " is outside the vocabulary of " + std::to_string(p.vocabulary)};
  }
  if (p.batch > 0) Step<T>(p, stream).run();
  return {};
}

#define GPTKERNELS_INSTANTIATE(T) template Status decode<T>(const Decode<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cpu
