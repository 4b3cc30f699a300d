// Flash attention on tiles of 64 queries and 64 keys. No include guard: each_instruction_set.h includes the file once
// for each instruction set.
//
// Forward, for each query tile:
//
//   out = 0, maximum = -inf, sum = 0                    per query
//   for each key tile:
//     scores = mask(scale * key @ query^T)              (keys, queries)
//     decay = exp(old maximum - new maximum)
//     scores = exp(scores - maximum);  sum = sum * decay + sum of scores over the keys;  scores = dropout(scores)
//     out = out * decay + value^T @ scores              (HS, queries)
//   out /= sum;  logsumexp = maximum + log(sum)
//
// Backward, for each query tile, with delta = dout . out - dlogsumexp:
//
//   for each key tile:  p = exp(scores - logsumexp);  dscores = p * (dropout(value @ dout^T) - delta)
//                       dvalue += dropout(p) @ dout;  dkey += dscores @ query;  dquery += key^T @ dscores
//   at the end:  dkey *= scale;  dquery *= scale
//
// A tile of scores is transposed, one row per key and one vector lane per query, so that maxima, sums and rescalings
// are elementwise operations on rows. The tensors with one row per query are transposed once per query tile, except in
// the forward with few queries (kFewQueries).

namespace gptkernels::cpu::GPTKERNELS_ISA {

// ---- tiles ----------------------------------------------------------------------------------------------------------

template <typename A>
struct Constants {
  static constexpr A kInfinity = std::numeric_limits<A>::infinity();
  // At or below this bias, bias + score rounds to the bias for every score of a realistic size.
  static constexpr A kLowBias = std::is_same_v<A, double> ? A(-1e280) : A(-1e30);
};

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

template <typename A, typename T>
void load_rows(A* to, int64_t ld, const T* from, int64_t stride, int64_t n, int64_t size) {
  for (int64_t r = 0; r < n; ++r) {
    const T* row = from + r * stride;
    A* out = to + r * ld;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) out[i] = A(row[i]);
    for (int64_t i = size; i < ld; ++i) out[i] = A(0);
  }
}

// The dot products include the sign of the scale, so that the largest dot product is the largest score. With an
// additive mask, an FMA multiplies the dot product by |scale| and adds the mask. Without one, exponentials() multiplies
// differences of dot products by |scale| * log2(e), so that the exponential of the largest score is exactly 1.
//
// If scores are several hundred, the rounding of `factor` causes a larger error than the rounding of the scores. The
// error would remain in the backward's small differences of score and logsumexp. The backward therefore multiplies the
// logsumexp by log2(e) in long double, and corrects the scores by `excess`.
template <typename A>
struct Scaling {
  using Wide = long double;  // double would add a rounding error to float64 results
  static constexpr Wide kLog2e = 1.4426950408889634073599246810018921L;

  A sign;
  A magnitude;  // 1 for a scale of 0
  Wide unit;    // the scaled score divided by the score that exponentials() receives
  A factor;     // unit * log2(e), rounded towards 0
  A excess;     // unit * log2(e) / factor - 1; positive, because 0 * -inf (a masked score) would be NaN

  Scaling(double scale, bool bias)
      : sign(scale == 0  ? A(0)
             : scale < 0 ? A(-1)
                         : A(1)),
        magnitude(scale == 0 ? A(1) : A(std::abs(scale))),
        unit(scale == 0 || bias ? Wide(1) : Wide(std::abs(scale))),
        factor(A(unit * kLog2e)) {
    if (factor > unit * kLog2e) factor = std::nextafter(factor, A(0));
    excess = std::max(A(unit * kLog2e / factor - 1), std::numeric_limits<A>::min());
  }
};

template <typename A>
struct Rows {
  const A* data;
  int64_t ld;
};

template <typename A, typename T>
Rows<A> rows_of(A* to, int64_t ld, const T* from, int64_t stride, int64_t n, int64_t size) {
  if constexpr (std::is_same_v<A, T>)
    if (ld == size) return {from, stride};
  load_rows(to, ld, from, stride, n, size);
  return {to, ld};
}

// to[i][r] = sign * rows[r][i] for r < n; lanes n to `lanes` - 1 are 0.
template <typename A>
void load_transposed(A* to, Rows<A> rows, int64_t n, int64_t lanes, int64_t size, A sign = 1) {
  transpose(to, kTile, rows.data, rows.ld, n, size);
  for (int64_t i = 0; i < size; ++i) {
    if (sign != A(1))
      for (int64_t r = 0; r < n; ++r) to[i * kTile + r] *= sign;
    for (int64_t r = n; r < lanes; ++r) to[i * kTile + r] = A(0);
  }
}

template <typename A, typename T>
void store_transposed(T* to, int64_t stride, const A* from, int64_t n, int64_t size, A factor, A* rows) {
  transpose(rows, size, from, kTile, size, n);
  for (int64_t r = 0; r < n; ++r)
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) store(to[r * stride + i], rows[r * size + i] * factor);
}

// Queries in lanes below `lane` do not see keys [first, last).
struct Part {
  int64_t first;
  int64_t last;
  int64_t lane;
};

struct ScoreTile {
  int64_t batch;
  int64_t head;
  int64_t query;      // a multiple of 64
  int64_t rows;       // at most 64
  int64_t lanes = 0;  // `rows` rounded up to a multiple of 16
  int64_t begin = 0;
  int64_t end = 0;

  int64_t keys() const { return end - begin; }
  // Terms per partial sum. With at most 16 queries the kernel is bound by memory bandwidth; shorter partial sums then
  // take no additional time, and make the scores as accurate as those of dot().
  int64_t sum_length() const { return lanes > 16 ? 64 : 16; }
};

// Calls fn for each part of the key tile. A tile that the causal diagonal crosses has parts of up to 16 keys, without
// the parts that no query sees. Any other tile is one part.
template <typename T, typename Fn>
void for_each_part(const ScoreTile& tile, const AttentionMask<T>& mask, const Fn& fn) {
  if (!mask.causal || tile.end - 1 <= tile.query + mask.query_offset) return fn(Part{0, tile.keys(), 0});
  for (int64_t first = 0; first < tile.keys(); first += 16) {
    const int64_t lane = (tile.begin + first - mask.query_offset - tile.query) / 16 * 16;
    if (lane < tile.lanes) fn(Part{first, std::min(first + 16, tile.keys()), std::max<int64_t>(lane, 0)});
  }
}

// If a query's additive mask is so low for all keys that adding a score does not change it, the probabilities are
// uniform over the keys with the largest mask value.
template <typename A>
struct UniformQueries {
  bool any = false;
  A shift[kTile] = {};  // 0 for the other queries
  A log2_count[kTile] = {};

  template <typename T>
  UniformQueries(const AttentionMask<T>& mask, const ScoreTile& tile, int64_t begin, int64_t end) {
    if (!mask.bias || std::is_same_v<T, float16>) return;  // -65504 is not low enough
    for (int64_t i = 0; i < tile.rows; ++i) {
      const int64_t last = mask.causal ? std::min(end, tile.query + i + mask.query_offset + 1) : end;
      const T* row = mask.bias + tile.batch * mask.batch + tile.head * mask.head + (tile.query + i) * mask.query;
      A largest = -Constants<A>::kInfinity;
      int64_t count = 0, j = begin;
      for (; j < last; ++j) {
        const A x = A(row[j * mask.key]);
        if (!(x <= Constants<A>::kLowBias)) break;
        if (x > largest) largest = x, count = 0;
        count += x == largest;
      }
      if (j < last || largest == -Constants<A>::kInfinity) continue;
      any = true;
      shift[i] = largest;
      log2_count[i] = std::log2(A(count));
    }
  }
};

template <typename T, typename A>
void apply_mask(A* scores, A magnitude, const ScoreTile& tile, const AttentionMask<T>& mask,
                const UniformQueries<A>& uniform) {
  constexpr A kHidden = -Constants<A>::kInfinity;
  if (mask.allowed || mask.bias) {
    const int64_t start =
        tile.batch * mask.batch + tile.head * mask.head + tile.query * mask.query + tile.begin * mask.key;
    const auto apply = [&](int64_t i, int64_t j) {
      A& score = scores[j * kTile + i];
      const int64_t at = start + i * mask.query + j * mask.key;
      if (mask.allowed)
        score = mask.allowed[at] ? score : kHidden;
      else
        score = std::fma(score, magnitude, A(mask.bias[at]));
    };
    if (mask.query == 0)
      for (int64_t j = 0; j < tile.keys(); ++j)
        for (int64_t i = 0; i < tile.rows; ++i) apply(i, j);
    else
      for (int64_t i = 0; i < tile.rows; ++i)
        for (int64_t j = 0; j < tile.keys(); ++j) apply(i, j);
    for (int64_t i = 0; uniform.any && i < tile.rows; ++i)
      for (int64_t j = 0; uniform.shift[i] != 0 && j < tile.keys(); ++j)
        scores[j * kTile + i] =
            A(mask.bias[start + i * mask.query + j * mask.key]) == uniform.shift[i] ? A(0) : kHidden;
  }
  if (mask.causal && tile.end - 1 > tile.query + mask.query_offset)
    for (int64_t j = 0; j < tile.keys(); ++j) {
      const int64_t hidden = tile.begin + j - mask.query_offset - tile.query;
      std::fill_n(scores + j * kTile, std::clamp<int64_t>(hidden, 0, tile.lanes), kHidden);
    }
}

// keep[j][i] = 1 / (1 - p) if dropout keeps the probability of key `aligned` + j and query tile.query + i, else 0.
template <typename A>
void dropout_tile(A* keep, const ScoreTile& tile, int64_t aligned, const Dropout& dropout, uint32_t head) {
  const A factor = A(dropout.factor);
  const int64_t groups = tile.lanes / 2, first = (dropout.first_query + tile.query) / 2;
  for (int64_t column = 0; column < round_up(tile.end - aligned, 16) / 4; ++column) {
    uint32_t words[4][kTile / 2];
#pragma omp simd
    for (int64_t r = 0; r < groups; ++r) {
      const PhiloxWords w = dropout_words(dropout.seed, dropout.offset, head, static_cast<uint32_t>(first + r),
                                          static_cast<uint32_t>(aligned / 4 + column));
      for (int i = 0; i < 4; ++i) words[i][r] = w.word[i];
    }
    for (int slot = 0; slot < 8; ++slot) {
      const int64_t key = column / 4 * 16 + slot / 2 % 2 * 8 + column % 4 * 2 + slot % 2;
      A* row = keep + key * kTile + slot / 4 * 8;
      const uint32_t* word = words[slot / 2];
      const int shift = 16 * (slot % 2);
      for (int64_t chunk = 0; chunk < tile.lanes / 16; ++chunk)
        for (int64_t r = 0; r < 8; ++r)
          row[chunk * 16 + r] = (word[chunk * 8 + r] >> shift & 0xFFFFu) >= dropout.threshold ? factor : A(0);
    }
  }
}

template <typename T>
std::pair<int64_t, int64_t> key_range(const AttentionMask<T>& mask, const AttentionSizes& s, int64_t b, int64_t query,
                                      int64_t rows) {
  int64_t begin = 0, end = s.keys;
  if (mask.key_begin) begin = std::max<int64_t>(begin, mask.key_begin[b]);
  if (mask.key_end) end = std::min<int64_t>(end, mask.key_end[b]);
  if (mask.causal) end = std::min(end, query + rows + mask.query_offset);
  return {begin, end};
}

// ---- forward --------------------------------------------------------------------------------------------------------

// Replaces the scores by exp2((score - maximum) * factor), with one query per lane of kColumns vectors. `decay`
// receives the factor that rescales the outputs of earlier tiles.
template <int kColumns, typename A>
[[gnu::always_inline]] inline void exponentials(A* scores, int64_t keys, A factor, A* maximum, A* sum, A* decay) {
  using V = Vector<A>;
  const V scale = V::set(factor);
  V largest[kColumns], total[kColumns];
#pragma GCC unroll 8
  for (int n = 0; n < kColumns; ++n) largest[n] = V::set(-Constants<A>::kInfinity);
  for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 8
    for (int n = 0; n < kColumns; ++n) largest[n] = V::max(largest[n], V::load(scores + j * kTile + n * V::kLanes));
#pragma GCC unroll 8
  for (int n = 0; n < kColumns; ++n) {
    const V before = V::load(maximum + n * V::kLanes);
    largest[n] = V::max(before, largest[n]);
    V::store(maximum + n * V::kLanes, largest[n]);
    largest[n] = V::finite_or_zero(largest[n]);
    V::store(decay + n * V::kLanes, V::exp2(V::mul(V::sub(before, largest[n]), scale)));
    total[n] = V::zero();
  }
  for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 8
    for (int n = 0; n < kColumns; ++n) {
      A* at = scores + j * kTile + n * V::kLanes;
      const V p = V::exp2(V::mul(V::sub(V::load(at), largest[n]), scale));
      V::store(at, p);
      total[n] = V::add(total[n], p);
    }
#pragma GCC unroll 8
  for (int n = 0; n < kColumns; ++n) {
    A* at = sum + n * V::kLanes;
    V::store(at, V::fma(V::load(at), V::load(decay + n * V::kLanes), total[n]));
  }
}

template <typename A>
void scale_lanes(A* to, int64_t rows, int64_t lanes, const A* factors) {
  for (int64_t r = 0; r < rows; ++r)
#pragma omp simd
    for (int64_t i = 0; i < lanes; ++i) to[r * kTile + i] *= factors[i];
}

// With up to 4 queries, as in decoding, most lanes would be empty, so a vector contains channels instead, and each
// score is a dot product. The backward adds in the same order, so that its scores are bitwise those of the forward.
constexpr int64_t kFewQueries = 4;

template <typename A>
void few_scores(A* scores, const ScoreTile& tile, A sign, Rows<A> query, int64_t width, Rows<A> key) {
  for (int64_t j = 0; j < tile.keys(); ++j) {
    A* row = scores + j * kTile;
    for (int64_t i = 0; i < tile.lanes; ++i) row[i] = A(0);
    for (int64_t i = 0; i < tile.rows; ++i)
      row[i] = sign * dot(query.data + i * query.ld, key.data + j * key.ld, width);
  }
}

// forward_tiles() and backward_tiles() receive pointers to this scratch memory on the stack, so they are compiled once
// for all values of kSize.
template <typename A, int kSize, int kArrays>
struct alignas(64) TileBuffers {
  A rows[kArrays][kSize * kTile];
};

template <typename A>
struct ForwardScratch {
  template <int kSize>
  explicit ForwardScratch(TileBuffers<A, kSize, 4>& room)
      : query(room.rows[0]), out(room.rows[1]), key(room.rows[2]), value(room.rows[3]) {}

  A* query;  // (HS, queries), or transposed if there are few queries
  A* out;    // same shape as query
  A* key;
  A* value;
  alignas(64) A scores[kTile * kTile];
  A keep[kTile * kTile];
  A maximum[kTile];
  A sum[kTile];
  A decay[kTile];
};

template <typename T>
void forward_tiles(const AttentionForward<T>& p, const Dropout& dropout, int64_t b, int64_t h, int64_t query,
                   ForwardScratch<accumulate_t<T>>& at) {
  using A = accumulate_t<T>;
  using V = Vector<A>;
  const AttentionSizes& s = p.sizes;
  const int64_t size = s.head_size, kh = h / (s.heads / s.key_heads);
  const Scaling<A> scaling(p.scale, p.mask.bias != nullptr);
  ScoreTile tile{.batch = b, .head = h, .query = query, .rows = std::min<int64_t>(kTile, s.queries - query)};
  tile.lanes = round_up(tile.rows, 16);

  const bool few = tile.rows <= kFewQueries;
  const int64_t width = few ? round_up(size, 16) : size;

  const T* queries = p.query.data + b * p.query.batch + h * p.query.head + query * p.query.token;
  if (few) {
    load_rows(at.query, width, queries, p.query.token, tile.rows, size);
  } else {
    load_transposed(at.query, rows_of(at.out, size, queries, p.query.token, tile.rows, size), tile.rows, tile.lanes,
                    size, scaling.sign);
  }
  std::fill_n(at.out, size * kTile, A(0));
  std::fill_n(at.maximum, kTile, -Constants<A>::kInfinity);
  std::fill_n(at.sum, kTile, A(0));
  const T* keys = p.key.data + b * p.key.batch + kh * p.key.head;
  const T* values = p.value.data + b * p.value.batch + kh * p.value.head;

  const auto [begin, end] = key_range(p.mask, s, b, query, tile.rows);
  const UniformQueries<A> uniform(p.mask, tile, begin, end);
  for (int64_t aligned = begin / kTile * kTile; aligned < end; aligned += kTile) {
    tile.begin = std::max(aligned, begin);
    tile.end = std::min(aligned + kTile, end);
    if (few) {
      const auto key = rows_of(at.key, width, keys + tile.begin * p.key.token, p.key.token, tile.keys(), size);
      few_scores(at.scores, tile, scaling.sign, Rows<A>{at.query, width}, width, key);
    } else {
      const auto key = rows_of(at.key, size, keys + tile.begin * p.key.token, p.key.token, tile.keys(), size);
      for_each_part(tile, p.mask, [&](Part part) {
        product(part.last - part.first, tile.lanes - part.lane, size,
                Left<A>{key.data + part.first * key.ld, key.ld, 1}, at.query + part.lane, kTile,
                at.scores + part.first * kTile + part.lane, kTile, false, tile.sum_length());
      });
    }
    apply_mask(at.scores, scaling.magnitude, tile, p.mask, uniform);
    for (int64_t lane = 0; lane < tile.lanes;) {
      constexpr int kColumns = V::kColumns;
      if (tile.lanes - lane >= kColumns * V::kLanes) {
        exponentials<kColumns>(at.scores + lane, tile.keys(), scaling.factor, at.maximum + lane, at.sum + lane,
                               at.decay + lane);
        lane += kColumns * V::kLanes;
      } else {
        exponentials<1>(at.scores + lane, tile.keys(), scaling.factor, at.maximum + lane, at.sum + lane,
                        at.decay + lane);
        lane += V::kLanes;
      }
    }
    if (dropout.on) {
      dropout_tile(at.keep, tile, aligned, dropout, dropout.head_number(b, h, s.heads));
      const A* keep = at.keep + (tile.begin - aligned) * kTile;
      for (int64_t i = 0; i < tile.keys() * kTile; ++i) at.scores[i] *= keep[i];
    }
    const T* value_rows = values + tile.begin * p.value.token;
    if (few) {
      const auto [value, ld] = rows_of(at.value, width, value_rows, p.value.token, tile.keys(), size);
      for (int64_t i = 0; i < tile.rows; ++i)
        for (int64_t d = 0; d < width; ++d) at.out[i * width + d] *= at.decay[i];
      product(tile.rows, width, tile.keys(), Left<A>{at.scores, 1, kTile}, value, ld, at.out, width, true);
      continue;
    }
    const auto value = rows_of(at.value, size, value_rows, p.value.token, tile.keys(), size);
    scale_lanes(at.out, size, tile.lanes, at.decay);
    for_each_part(tile, p.mask, [&](Part part) {
      product(size, tile.lanes - part.lane, part.last - part.first,
              Left<A>{value.data + part.first * value.ld, 1, value.ld}, at.scores + part.first * kTile + part.lane,
              kTile, at.out + part.lane, kTile, true);
    });
  }

  T* out = p.out.data + b * p.out.batch + h * p.out.head + query * p.out.token;
  A* logsumexp = p.logsumexp + (b * s.heads + h) * s.queries + query;
  for (int64_t i = 0; i < tile.rows; ++i) {
    const bool none = at.sum[i] == 0;
    logsumexp[i] = none ? -Constants<A>::kInfinity
                        : A(uniform.shift[i] + at.maximum[i] * scaling.unit + std::log(double(at.sum[i])));
    at.sum[i] = none ? A(1) : at.sum[i];
  }
  if (few) {
    for (int64_t i = 0; i < tile.rows; ++i)
      for (int64_t d = 0; d < size; ++d) store(out[i * p.out.token + d], at.out[i * width + d] / at.sum[i]);
    return;
  }
  for (int64_t d = 0; d < size; ++d)
#pragma omp simd
    for (int64_t i = 0; i < tile.rows; ++i) at.out[d * kTile + i] /= at.sum[i];
  store_transposed(out, p.out.token, at.out, tile.rows, size, A(1), at.query);
}

// A task is the i-th query tile from the start and the i-th from the end. With a causal mask, all tasks then see about
// the same number of keys. The function is not inlined, so that the stack holds the scratch memory of one kSize only.
template <int kSize, typename T>
[[gnu::noinline]] void forward_range(const AttentionForward<T>& p, const Dropout& dropout, int64_t begin, int64_t end) {
  TileBuffers<accumulate_t<T>, kSize, 4> room;
  ForwardScratch<accumulate_t<T>> scratch(room);
  const int64_t tiles = round_up(p.sizes.queries, kTile) / kTile, pairs = (tiles + 1) / 2;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / pairs / p.sizes.heads, h = task / pairs % p.sizes.heads, first = task % pairs;
    forward_tiles(p, dropout, b, h, first * kTile, scratch);
    if (const int64_t last = tiles - 1 - first; last != first) forward_tiles(p, dropout, b, h, last * kTile, scratch);
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------

template <typename A>
struct BackwardScratch {
  template <int kSize>
  explicit BackwardScratch(TileBuffers<A, kSize, 7>& room)
      : query_transposed(room.rows[0]),
        dout_transposed(room.rows[1]),
        dquery(room.rows[2]),
        query(room.rows[3]),
        dout(room.rows[4]),
        key(room.rows[5]),
        value(room.rows[6]) {}

  A* query_transposed;
  A* dout_transposed;
  A* dquery;  // (HS, queries)
  A* query;
  A* dout;
  A* key;
  A* value;
  alignas(64) A probabilities[kTile * kTile];
  A dscores[kTile * kTile];
  A keep[kTile * kTile];
  A logsumexp[kTile];       // -logsumexp * log2(e)
  A logsumexp_rest[kTile];  // -(the rounding error of `logsumexp`) - `logsumexp` * excess
  A delta[kTile];
};

// On entry, `gradients` has the gradients of the probabilities after dropout. The function replaces `scores` by these
// probabilities, and `gradients` by the gradients of the scores.
template <typename A>
void score_gradients(A* scores, A* gradients, const A* keep, Part part, int64_t lanes, const Scaling<A>& scaling,
                     const A* logsumexp, const A* logsumexp_rest, const A* delta) {
  using V = Vector<A>;
  const V scale = V::set(scaling.factor), excess = V::set(scaling.excess);
  for (int64_t j = part.first; j < part.last; ++j)
    for (int64_t i = part.lane; i < lanes; i += V::kLanes) {
      A* score = scores + j * kTile + i;
      A* gradient = gradients + j * kTile + i;
      const V above = V::fma(V::load(score), scale, V::load(logsumexp + i));
      const V p = V::exp2(V::fma(above, excess, V::add(above, V::load(logsumexp_rest + i))));
      V dp = V::load(gradient), dropped = p;
      if (keep) {
        const V k = V::load(keep + j * kTile + i);
        dp = V::mul(dp, k);
        dropped = V::mul(p, k);
      }
      V::store(score, dropped);
      V::store(gradient, V::mul(p, V::sub(dp, V::load(delta + i))));
    }
}

template <typename A>
void dots_of_lanes(A* dots, const A* a, const A* b, int64_t lanes, int64_t n, int64_t length) {
  using V = Vector<A>;
  for (int64_t i = 0; i < lanes; i += V::kLanes) {
    V dot = V::zero();
    for (int64_t begin = 0; begin < n; begin += length) {
      V part = V::zero();
      for (int64_t k = begin; k < std::min(begin + length, n); ++k)
        part = V::fma(V::load(a + k * kTile + i), V::load(b + k * kTile + i), part);
      dot = V::add(dot, part);
    }
    V::store(dots + i, dot);
  }
}

// Computes dquery of a query tile, and adds the tile's terms to dkey and dvalue, whose shape is (Tk, HS rounded up to a
// multiple of 16).
template <typename T>
void backward_tiles(const AttentionBackward<T>& p, const Dropout& dropout, int64_t b, int64_t h, int64_t query,
                    accumulate_t<T>* dkey, accumulate_t<T>* dvalue, BackwardScratch<accumulate_t<T>>& at) {
  using A = accumulate_t<T>;
  const AttentionSizes& s = p.sizes;
  const int64_t size = s.head_size, width = round_up(size, 16), kh = h / (s.heads / s.key_heads);
  const Scaling<A> scaling(p.scale, p.mask.bias != nullptr);
  ScoreTile tile{.batch = b, .head = h, .query = query, .rows = std::min<int64_t>(kTile, s.queries - query)};
  tile.lanes = round_up(tile.rows, 16);
  const bool few = tile.rows <= kFewQueries;
  const int64_t row = few ? width : size;

  const T* queries = p.query.data + b * p.query.batch + h * p.query.head + query * p.query.token;
  const T* douts = p.dout.data + b * p.dout.batch + h * p.dout.head + query * p.dout.token;
  const T* outs = p.out.data + b * p.out.batch + h * p.out.head + query * p.out.token;
  const int64_t statistic = (b * s.heads + h) * s.queries + query;
  const auto all = rows_of(at.query, width, queries, p.query.token, tile.rows, size);
  const auto dall = rows_of(at.dout, width, douts, p.dout.token, tile.rows, size);
  load_transposed(at.query_transposed, all, tile.rows, tile.lanes, size, scaling.sign);
  load_transposed(at.dout_transposed, dall, tile.rows, tile.lanes, size);
  const auto [begin, end] = key_range(p.mask, s, b, query, tile.rows);
  const UniformQueries<A> uniform(p.mask, tile, begin, end);
  // The terms of dout . out are added in the same order as those of the probabilities' gradients. For a query that sees
  // a single key, both sums are then equal, and the gradient of the score is exactly 0 (without dropout and
  // dlogsumexp).
  const auto out = rows_of(at.key, width, outs, p.out.token, tile.rows, size);
  if (few) {
    for (int64_t i = 0; i < tile.rows; ++i) at.delta[i] = dot(dall.data + i * dall.ld, out.data + i * out.ld, width);
  } else {
    load_transposed(at.dquery, out, tile.rows, tile.lanes, size);
    dots_of_lanes(at.delta, at.dquery, at.dout_transposed, tile.lanes, size, tile.sum_length());
  }
  std::fill_n(at.dquery, size * kTile, A(0));
  for (int64_t i = 0; i < kTile; ++i) {
    // Lanes without a query, and queries that see no key, get probabilities of 0.
    at.logsumexp[i] = -Constants<A>::kInfinity;
    at.logsumexp_rest[i] = 0;
    if (i >= tile.rows) {
      at.delta[i] = 0;
      continue;
    }
    if (const A given = p.logsumexp[statistic + i]; given != -Constants<A>::kInfinity) {
      const auto logsumexp = uniform.shift[i] != 0 ? uniform.log2_count[i] : given * scaling.kLog2e;
      at.logsumexp[i] = A(-logsumexp);
      if (std::isfinite(given))
        at.logsumexp_rest[i] =
            A(-at.logsumexp[i] - logsumexp - at.logsumexp[i] * typename Scaling<A>::Wide(scaling.excess));
    }
    if (p.dlogsumexp) at.delta[i] -= p.dlogsumexp[statistic + i];
  }
  const T* keys = p.key.data + b * p.key.batch + kh * p.key.head;
  const T* values = p.value.data + b * p.value.batch + kh * p.value.head;

  for (int64_t aligned = begin / kTile * kTile; aligned < end; aligned += kTile) {
    tile.begin = std::max(aligned, begin);
    tile.end = std::min(aligned + kTile, end);
    const auto key = rows_of(at.key, row, keys + tile.begin * p.key.token, p.key.token, tile.keys(), size);
    const auto value = rows_of(at.value, row, values + tile.begin * p.value.token, p.value.token, tile.keys(), size);
    const A* keep = nullptr;
    if (dropout.on) {
      dropout_tile(at.keep, tile, aligned, dropout, dropout.head_number(b, h, s.heads));
      keep = at.keep + (tile.begin - aligned) * kTile;
    }
    if (few) {
      few_scores(at.probabilities, tile, scaling.sign, all, width, key);
      few_scores(at.dscores, tile, A(1), dall, width, value);
    } else {
      for_each_part(tile, p.mask, [&](Part part) {
        const int64_t n = part.last - part.first, first = part.first * kTile + part.lane;
        product(n, tile.lanes - part.lane, size, Left<A>{key.data + part.first * key.ld, key.ld, 1},
                at.query_transposed + part.lane, kTile, at.probabilities + first, kTile, false, tile.sum_length());
        product(n, tile.lanes - part.lane, size, Left<A>{value.data + part.first * value.ld, value.ld, 1},
                at.dout_transposed + part.lane, kTile, at.dscores + first, kTile, false, tile.sum_length());
      });
    }
    apply_mask(at.probabilities, scaling.magnitude, tile, p.mask, uniform);
    for_each_part(tile, p.mask, [&](Part part) {
      const int64_t n = part.last - part.first, first = part.first * kTile + part.lane;
      const int64_t to = (tile.begin + part.first) * width;
      score_gradients(at.probabilities, at.dscores, keep, part, tile.lanes, scaling, at.logsumexp, at.logsumexp_rest,
                      at.delta);
      product(n, width, tile.rows - part.lane, Left<A>{at.probabilities + first, kTile, 1},
              dall.data + part.lane * dall.ld, dall.ld, dvalue + to, width, true);
      product(n, width, tile.rows - part.lane, Left<A>{at.dscores + first, kTile, 1}, all.data + part.lane * all.ld,
              all.ld, dkey + to, width, true);
      product(size, tile.lanes - part.lane, n, Left<A>{key.data + part.first * key.ld, 1, key.ld}, at.dscores + first,
              kTile, at.dquery + part.lane, kTile, true);
    });
  }
  T* dquery = p.dquery.data + b * p.dquery.batch + h * p.dquery.head + query * p.dquery.token;
  store_transposed(dquery, p.dquery.token, at.dquery, tile.rows, size, A(gradient_scale(p)), at.key);
}

template <typename T>
void add_splits(const AttentionBackward<T>& p, int64_t b, int64_t kh, int64_t first, int64_t last,
                const accumulate_t<T>* sums, int64_t splits) {
  using A = accumulate_t<T>;
  const int64_t width = round_up(p.sizes.head_size, 16), slab = p.sizes.keys * width;
  const auto add = [&](const HeadsView<T>& to, const A* from, A factor) {
    for (int64_t key = first; key < last; ++key) {
      T* row = to.data + b * to.batch + kh * to.head + key * to.token;
      const A* sum = from + key * width;
      if (splits == 1) {
#pragma omp simd
        for (int64_t d = 0; d < p.sizes.head_size; ++d) store(row[d], sum[d] * factor);
        continue;
      }
#pragma omp simd
      for (int64_t d = 0; d < p.sizes.head_size; ++d) {
        A total = 0;
        for (int64_t split = 0; split < splits; ++split) total += sum[split * 2 * slab + d];
        store(row[d], total * factor);
      }
    }
  };
  add(p.dkey, sums, A(gradient_scale(p)));
  add(p.dvalue, sums + slab, A(1));
}

// Each of the `splits` tasks of a key head has separate sums of dkey and dvalue. Every second group of `splits` query
// tiles is assigned in reverse order, because later tiles see more keys under a causal mask. If `splits` is 1, the task
// itself writes dkey and dvalue, and the next task reuses the memory of the sums, which is still in the cache.
template <int kSize, typename T>
[[gnu::noinline]] void backward_range(const AttentionBackward<T>& p, const Dropout& dropout, int64_t splits,
                                      int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  TileBuffers<A, kSize, 7> room;
  BackwardScratch<A> scratch(room);
  const AttentionSizes& s = p.sizes;
  const int64_t tiles = round_up(s.queries, kTile) / kTile, shared = s.heads / s.key_heads;
  const int64_t slab = s.keys * round_up(s.head_size, 16);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t split = task % splits, b = task / splits / s.key_heads, kh = task / splits % s.key_heads;
    A* dkey = static_cast<A*>(p.workspace) + (splits == 1 ? begin : task) * 2 * slab;
    std::fill_n(dkey, 2 * slab, A(0));
    for (int64_t unit = 0; unit * splits < shared * tiles; ++unit) {
      const int64_t i = unit * splits + (unit % 2 ? splits - 1 - split : split);
      if (i < shared * tiles)
        backward_tiles(p, dropout, b, kh * shared + i / tiles, i % tiles * kTile, dkey, dkey + slab, scratch);
    }
    if (splits == 1) add_splits(p, b, kh, 0, s.keys, dkey, 1);
  }
}

template <typename T>
void add_splits_range(const AttentionBackward<T>& p, int64_t splits, int64_t begin, int64_t end) {
  const AttentionSizes& s = p.sizes;
  const int64_t tiles = round_up(s.keys, kTile) / kTile, slab = s.keys * round_up(s.head_size, 16);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t head = i / tiles, first = i % tiles * kTile;
    const auto* sums = static_cast<const accumulate_t<T>*>(p.workspace) + head * splits * 2 * slab;
    add_splits(p, head / s.key_heads, head % s.key_heads, first, std::min(first + kTile, s.keys), sums, splits);
  }
}

}  // namespace gptkernels::cpu::GPTKERNELS_ISA
