#include "../encoder.h"

#include <algorithm>
#include <bit>
#include <string>
#include <type_traits>

#include "simd.h"

namespace gptkernels::cpu {
namespace {

// ---- tokens ---------------------------------------------------------------------------------------------------------

template <typename Token>
bool outside(Token token, int64_t vocabulary) {
  return token < 0 || token >= vocabulary;
}

// One thread checks all tokens, so the error does not depend on the number of threads. The tokens are few bytes
// compared with the embeddings.
template <typename P>
Status check_tokens(const P& p, bool has_positions) {
  const int64_t n = p.batch * p.length;
  int64_t bad = 0;
  vectorised([&] {
    for (int64_t i = 0; i < n; ++i) bad += outside(p.tokens[i], p.vocabulary);
  });
  if (bad == 0) return {};
  const auto* token = std::find_if(p.tokens, p.tokens + n, [&](auto t) { return outside(t, p.vocabulary); });
  const int64_t i = token - p.tokens;
  const std::string position = has_positions
                                   ? "(" + std::to_string(i / p.length) + ", " + std::to_string(i % p.length) + ")"
                                   : std::to_string(i);
  return {"token " + std::to_string(*token) + " at position " + position + " is outside the vocabulary of " +
          std::to_string(p.vocabulary)};
}

// ---- forward --------------------------------------------------------------------------------------------------------

template <typename T, typename Token>
void forward_row(const EncoderForward<T, Token>& p, int64_t row) {
  using A = accumulate_t<T>;
  T* out = p.out + row * p.width;
  const int64_t local = p.tokens[row] - p.first_token;
  if (outside(local, p.table_rows)) {
    std::fill_n(out, p.width, T(0));
    return;
  }
  const T* wte = p.wte + local * p.width;
  if (p.wpe == nullptr) {
    std::copy_n(wte, p.width, out);
    return;
  }
  const T* wpe = p.wpe + row % p.length * p.width;
#pragma omp simd
  for (int64_t i = 0; i < p.width; ++i) store(out[i], A(wte[i]) + A(wpe[i]));
}

// ---- backward -------------------------------------------------------------------------------------------------------

// For float32, runs of kRun rows are summed in float32, and their sums in float64, so that the rounding error grows
// with the length of a run, not with the number of rows.
template <typename T, typename Row>
void sum_rows(T* out, int64_t count, int64_t width, const Row& row, bool accumulate = false) {
  using A = accumulate_t<T>;
  using Total = std::conditional_t<sizeof(T) == 4, double, A>;
  constexpr int64_t kRun = 32;
  constexpr int64_t kTile = 256;  // `total` and `sum` stay in the L1 cache
  for (int64_t column = 0; column < width; column += kTile) {
    const int64_t columns = std::min(kTile, width - column);
    Total total[kTile] = {};
    for (int64_t begin = 0; begin < count; begin += kRun) {
      A sum[kTile] = {};
      const int64_t end = std::min(begin + kRun, count);
      int64_t r = begin;
      for (; r + 4 <= end; r += 4) {
        const T* const a = row(r) + column;
        const T* const b = row(r + 1) + column;
        const T* const c = row(r + 2) + column;
        const T* const d = row(r + 3) + column;
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) sum[i] += (A(a[i]) + A(b[i])) + (A(c[i]) + A(d[i]));
      }
      for (; r < end; ++r) {
        const T* values = row(r) + column;
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) sum[i] += A(values[i]);
      }
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) total[i] += sum[i];
    }
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i)
      store(out[column + i], A(total[i]) + (accumulate ? A(out[column + i]) : A(0)));
  }
}

// The token of row v of dwte occurs at order[starts[v]], ..., order[starts[v + 1] - 1], in ascending order, so that one
// thread sums each row in a fixed order. Other shards' tokens are left out.
struct Sorted {
  int64_t* starts;  // (R + 2); the last element is scratch
  int64_t* order;   // (B * T)
};

template <typename T, typename Token>
Sorted sort_positions(const EncoderBackward<T, Token>& p) {
  const int64_t n = p.batch * p.length;
  int64_t* starts = static_cast<int64_t*>(p.workspace);
  int64_t* order = starts + p.vocabulary + 2;
  std::fill_n(starts, p.vocabulary + 2, int64_t(0));
  const auto for_tokens = [&](const auto& fn) {
    for (int64_t i = 0; i < n; ++i)
      if (const int64_t row = p.tokens[i] - p.first_token; !outside(row, p.vocabulary)) fn(row, i);
  };
  for_tokens([&](int64_t row, int64_t) { ++starts[row + 2]; });
  for (int64_t v = 0; v < p.vocabulary; ++v) starts[v + 2] += starts[v + 1];
  // The loop advances starts[v + 1] from the start of token v to the start of token v + 1.
  for_tokens([&](int64_t row, int64_t i) { order[starts[row + 1]++] = i; });
  return {starts, order};
}

template <typename T>
void backward_token(const EncoderSums<T>& p, const Sorted& sorted, int64_t v) {
  const int64_t* order = sorted.order + sorted.starts[v];
  const int64_t count = sorted.starts[v + 1] - sorted.starts[v];
  const auto row = [&](int64_t r) { return p.dout + order[r] * p.width; };
  sum_rows(p.dwte + v * p.width, count, p.width, row, p.accumulate);
}

template <typename T>
void backward_position(const EncoderSums<T>& p, int64_t t) {
  const int64_t count = t < p.length ? p.batch : 0;
  sum_rows(p.dwpe + t * p.width, count, p.width, [&](int64_t b) { return p.dout + (b * p.length + t) * p.width; });
}

template <typename T>
void backward_sums(const EncoderSums<T>& p, const Sorted& sorted, Stream stream) {
  const int64_t* starts = sorted.starts;
  if (!p.accumulate)
    parallel_for(stream, p.vocabulary, p.width, [&](int64_t begin, int64_t end) {
      for (int64_t v = begin; v < end; ++v)
        if (starts[v] == starts[v + 1]) std::fill_n(p.dwte + v * p.width, p.width, T(0));
    });
  // Frequent tokens are neighbours in most vocabularies, so threads with equal ranges of tokens would have unequal
  // work. The threads divide the sorted positions instead, and the thread with a token's first position sums the
  // token's row.
  parallel_for(stream, starts[p.vocabulary], p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t v = std::lower_bound(starts, starts + p.vocabulary, begin) - starts;
           v < p.vocabulary && starts[v] < end; ++v)
        if (starts[v] < starts[v + 1]) backward_token(p, sorted, v);
    });
  });
  if (p.dwpe)
    parallel_for(stream, p.positions, p.width * (p.batch + 1), [&](int64_t begin, int64_t end) {
      vectorised([&] {
        for (int64_t t = begin; t < end; ++t) backward_position(p, t);
      });
    });
}

}  // namespace

template <typename T, typename Token>
Status encoder_forward(const EncoderForward<T, Token>& p, Stream stream) {
  if (Status status = check_tokens(p, p.wpe != nullptr); !status.ok()) return status;
  parallel_for(stream, p.batch * p.length, p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t row = begin; row < end; ++row) forward_row(p, row);
    });
  });
  return {};
}

template <typename T, typename Token>
int64_t encoder_backward_workspace(int64_t batch, int64_t length, int64_t vocabulary, int64_t) {
  return (vocabulary + 2 + batch * length) * int64_t(sizeof(int64_t));
}

template <typename T, typename Token>
Status encoder_backward(const EncoderBackward<T, Token>& p, Stream stream) {
  if (!p.is_shard)
    if (Status status = check_tokens(p, p.dwpe != nullptr); !status.ok()) return status;
  backward_sums(std::bit_cast<EncoderSums<T>>(p), sort_positions(p), stream);
  return {};
}

#define GPTKERNELS_INSTANTIATE(T, Token)                                                     \
  template Status encoder_forward<T, Token>(const EncoderForward<T, Token>&, Stream);        \
  template int64_t encoder_backward_workspace<T, Token>(int64_t, int64_t, int64_t, int64_t); \
  template Status encoder_backward<T, Token>(const EncoderBackward<T, Token>&, Stream);
#define GPTKERNELS_INSTANTIATE_TOKENS(T) \
  GPTKERNELS_INSTANTIATE(T, int32_t)     \
  GPTKERNELS_INSTANTIATE(T, int64_t)
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE_TOKENS)

}  // namespace gptkernels::cpu
