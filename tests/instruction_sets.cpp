// Compares the results of attention's CPU kernels for the instruction sets that this processor supports. The results
// for AVX2 and AVX-512 must be bitwise identical. The results of the kernels for any processor must equal those for
// AVX2 within a tolerance. (A process that uses the library runs the kernels for one instruction set only.)
#include <cstdio>
#include <random>
#include <vector>

#include "../csrc/cpu/attention.cpp"

using namespace gptkernels::cpu;

namespace {

struct Case {
  int64_t queries, keys, head_size;
  bool causal;
  double dropout;
};

template <typename T>
struct Outputs {
  std::vector<T> out, dquery, dkey, dvalue;
  std::vector<accumulate_t<T>> logsumexp;
};

// A sequence with two query heads, which share one head of keys and values.
template <typename T>
struct Problem {
  Case c;
  AttentionSizes sizes{1, 2, 1, c.queries, c.keys, c.head_size};
  int64_t seed = 5, offset = 7;
  std::mt19937 generator{1};
  std::vector<T> query = random(2 * c.queries), key = random(c.keys), value = random(c.keys),
                 dout = random(2 * c.queries);

  std::vector<T> random(int64_t rows) {
    std::normal_distribution<double> normal;
    std::vector<T> values(rows * c.head_size);
    for (T& x : values) store(x, accumulate_t<T>(normal(generator)));
    return values;
  }
  template <typename U>
  HeadsView<U> view(U* data, int64_t tokens) {
    return {data, 2 * tokens * c.head_size, tokens * c.head_size, c.head_size};
  }
};

template <typename T, typename Forward, typename Backward>
Outputs<T> run(Problem<T>& p, const Forward& forward, const Backward& backward) {
  Outputs<T> o{.out = p.query, .dquery = p.query, .dkey = p.key, .dvalue = p.key, .logsumexp = {}};
  o.logsumexp.resize(2 * p.c.queries);
  AttentionMask<T> mask;
  mask.causal = p.c.causal;
  mask.query_offset = p.c.keys - p.c.queries;
  const DropoutArguments dropout{p.c.dropout, &p.seed, &p.offset};
  const auto query = p.template view<const T>(p.query.data(), p.c.queries);
  const auto key = p.template view<const T>(p.key.data(), p.c.keys);
  const auto value = p.template view<const T>(p.value.data(), p.c.keys);
  const AttentionForward<T> f{.out = p.view(o.out.data(), p.c.queries),
                              .logsumexp = o.logsumexp.data(),
                              .query = query,
                              .key = key,
                              .value = value,
                              .sizes = p.sizes,
                              .scale = -0.1,
                              .mask = mask,
                              .dropout = dropout};
  forward(f, read(dropout), 2 * ((tiles(p.c.queries) + 1) / 2));
  AttentionBackward<T> b{.dquery = p.view(o.dquery.data(), p.c.queries),
                         .dkey = p.view(o.dkey.data(), p.c.keys),
                         .dvalue = p.view(o.dvalue.data(), p.c.keys),
                         .dout = p.template view<const T>(p.dout.data(), p.c.queries),
                         .dlogsumexp = nullptr,
                         .out = p.template view<const T>(o.out.data(), p.c.queries),
                         .logsumexp = o.logsumexp.data(),
                         .query = query,
                         .key = key,
                         .value = value,
                         .sizes = p.sizes,
                         .scale = -0.1,
                         .mask = mask,
                         .dropout = dropout};
  std::vector<char> workspace(attention_backward_workspace(b));
  b.workspace = workspace.data();
  backward(b, read(dropout), backward_splits(p.sizes), tiles(p.c.keys));
  return o;
}

#define GPTKERNELS_RUN(isa)                                                                       \
  run(                                                                                            \
      p, [](const auto& f, const Dropout& d, int64_t n) { isa::forward_range<256>(f, d, 0, n); }, \
      [](const auto& b, const Dropout& d, int64_t splits, int64_t n) {                            \
        isa::backward_range<256>(b, d, splits, 0, splits);                                        \
        isa::add_splits_range(b, splits, 0, n);                                                   \
      })

// Returns the largest magnitude of a[i] - b[i], or NaN if a difference is NaN.
template <typename T>
double difference(const std::vector<T>& a, const std::vector<T>& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::abs(double(accumulate_t<T>(a[i])) - double(accumulate_t<T>(b[i])));
    if (d != d) return d;
    worst = std::max(worst, d);
  }
  return worst;
}

template <typename T>
bool close(const Outputs<T>& a, const Outputs<T>& b, double tolerance) {
  return difference(a.out, b.out) <= tolerance && difference(a.dquery, b.dquery) <= tolerance &&
         difference(a.dkey, b.dkey) <= tolerance && difference(a.dvalue, b.dvalue) <= tolerance &&
         difference(a.logsumexp, b.logsumexp) <= tolerance;
}

template <typename T>
bool check(Case c, [[maybe_unused]] double tolerance) {
  Problem<T> p{.c = c};
  const Outputs<T> baseline = GPTKERNELS_RUN(attention_baseline);
  bool ok = baseline.out.size() > 0;
#ifdef GPTKERNELS_X86
  if (processor_capability() == Capability::kDefault) return ok;
  const Outputs<T> avx2 = GPTKERNELS_RUN(attention_avx2);
  ok = ok && close(baseline, avx2, tolerance);
  if (processor_capability() == Capability::kAvx2) return ok;
  ok = ok && close(avx2, GPTKERNELS_RUN(attention_avx512), 0);
#endif
  return ok;
}

}  // namespace

int main() {
  const bool ok = check<float>({200, 200, 64, true, 0.2}, 1e-5) && check<float>({70, 131, 33, false, 0}, 1e-5) &&
                  check<float>({2, 131, 80, true, 0}, 1e-5) && check<float>({40, 40, 7, true, 0}, 1e-5) &&
                  check<double>({100, 100, 64, true, 0.1}, 1e-13) && check<bfloat16>({130, 130, 128, true, 0}, 0.02) &&
                  check<float16>({65, 65, 16, true, 0}, 0.005);
  std::puts(ok ? "ok" : "wrong");
}
