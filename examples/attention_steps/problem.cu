// The rate counts the two matmuls' flops for the keys that the queries see, as docs/benchmarks.md does. The error is
// the largest difference between a query's output and the formula in double, relative to the largest element of that
// output. It must be below 2^-7, because the softmax's weights and the output are each rounded to bfloat16.
#include "problem.h"

namespace {

constexpr int kBatches = 64, kTokens = 1024, kHeads = 12;
constexpr int kHeadsBetweenChecks = 37, kQueriesBetweenChecks = 11;  // 1023, the last query, is a multiple of 11

using Rows = std::vector<std::vector<double>>;  // (T, HS)

Rows host_rows(const Attention& p, Part part, int head) {
  Rows rows;
  for (int token = 0; token < p.tokens; ++token) {
    const auto row = host_copy(row_of(p, part, head, token), kChannels);
    rows.emplace_back(row.begin(), row.end());
  }
  return rows;
}

double query_error(const Attention& p, int head, int query, const Rows& queries, const Rows& keys, const Rows& values) {
  double exact[kChannels] = {}, sum = 0, max = -INFINITY;
  std::vector<double> scores(query + 1);
  for (int key = 0; key <= query; ++key) {
    for (int c = 0; c < kChannels; ++c) scores[key] += queries[query][c] * keys[key][c] * double(kScale);
    max = std::max(max, scores[key]);
  }
  for (int key = 0; key <= query; ++key) {
    const double weight = std::exp(scores[key] - max);
    sum += weight;
    for (int c = 0; c < kChannels; ++c) exact[c] += weight * values[key][c];
  }
  const auto out = host_copy(out_of(p, head, query), kChannels);
  double error = 0, largest = 0;
  for (int c = 0; c < kChannels; ++c) {
    error = larger_error(error, double(float(out[c])) - exact[c] / sum);
    largest = std::max(largest, std::abs(exact[c] / sum));
  }
  return error / largest;
}

}  // namespace

int main() {
  const size_t size = size_t(kBatches) * kTokens * kHeads * kChannels;
  const Attention p = {.out = allocate<bfloat16>(size),
                       .qkv = random_numbers(3 * size, 1, 3),
                       .batches = kBatches,
                       .tokens = kTokens,
                       .heads = kHeads};
  attention(p);
  check(cudaGetLastError());
  check(cudaDeviceSynchronize());
  double error = 0;
  for (int head = 0; head < kBatches * kHeads; head += kHeadsBetweenChecks) {
    const Rows queries = host_rows(p, kQuery, head), keys = host_rows(p, kKey, head),
               values = host_rows(p, kValue, head);
    for (int query = 0; query < kTokens; query += kQueriesBetweenChecks)
      error = larger_error(error, query_error(p, head, query, queries, keys, values));
  }
  const double seconds = median_seconds([&] { attention(p); });
  return report(seconds, 2.0 * size * kTokens, 1e12, error, 1.0 / 128);
}
