// Vectors for kernels that keep a block of kRows x kColumns vectors of accumulators in registers, which compilers do
// not do for plain loops. No include guard: each_instruction_set.h includes this file and the kernels once for each
// instruction set, in the namespace GPTKERNELS_ISA.
//
// No function of Vector combines lanes, so the AVX2 and AVX-512 versions give the same bits. The version for other
// processors may give other bits: it computes exp2 by std::exp2, and on x86 it rounds a * b + c twice.

namespace gptkernels::cpu::GPTKERNELS_ISA {

#define GPTKERNELS_INLINE [[gnu::always_inline]] static inline

// Returns 2^r for |r| <= 1/2, by a polynomial from Cephes with a relative error below 2^-25.
template <typename V>
[[gnu::always_inline]] inline V power_of_fraction(V r) {
  V p = V::set(1.535336188319500e-4f);
  for (const float c : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                        6.931472028550421e-1f, 1.0f})
    p = V::fma(p, r, V::set(c));
  return p;
}

// 2^-150 and smaller powers round to 0. For them, exp2() avoids multiplications with denormal results, which take an
// Intel processor more than a hundred cycles. Such powers are frequent, because masked keys have scores of -inf.
constexpr float kLowestExponent = -150.0f;

template <typename A>
struct Vector;

#if GPTKERNELS_VECTOR_BITS == 512

template <>
struct Vector<float> {
  static constexpr int kLanes = 16, kColumns = 4, kRows = 6;
  __m512 v;
  GPTKERNELS_INLINE Vector zero() { return {_mm512_setzero_ps()}; }
  GPTKERNELS_INLINE Vector set(float x) { return {_mm512_set1_ps(x)}; }
  GPTKERNELS_INLINE Vector load(const float* p) { return {_mm512_loadu_ps(p)}; }
  GPTKERNELS_INLINE void store(float* p, Vector a) { _mm512_storeu_ps(p, a.v); }
  GPTKERNELS_INLINE Vector fma(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  GPTKERNELS_INLINE Vector add(Vector a, Vector b) { return {_mm512_add_ps(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector sub(Vector a, Vector b) { return {_mm512_sub_ps(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector mul(Vector a, Vector b) { return {_mm512_mul_ps(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector max(Vector a, Vector b) { return {_mm512_max_ps(a.v, b.v)}; }
  // Replaces -inf by 0.
  GPTKERNELS_INLINE Vector finite_or_zero(Vector a) {
    const __mmask16 lowest = _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    return {_mm512_mask_mov_ps(a.v, lowest, _mm512_setzero_ps())};
  }
  GPTKERNELS_INLINE Vector exp2(Vector a) {
    const __m512 n = _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __mmask16 above = _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(kLowestExponent), _CMP_NLE_UQ);  // true for NaN
    return {_mm512_maskz_scalef_ps(above, power_of_fraction(Vector{_mm512_sub_ps(a.v, n)}).v, n)};
  }
};

template <>
struct Vector<double> {
  static constexpr int kLanes = 8, kColumns = 4, kRows = 6;
  __m512d v;
  GPTKERNELS_INLINE Vector zero() { return {_mm512_setzero_pd()}; }
  GPTKERNELS_INLINE Vector set(double x) { return {_mm512_set1_pd(x)}; }
  GPTKERNELS_INLINE Vector load(const double* p) { return {_mm512_loadu_pd(p)}; }
  GPTKERNELS_INLINE void store(double* p, Vector a) { _mm512_storeu_pd(p, a.v); }
  GPTKERNELS_INLINE Vector fma(Vector a, Vector b, Vector c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
  GPTKERNELS_INLINE Vector add(Vector a, Vector b) { return {_mm512_add_pd(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector sub(Vector a, Vector b) { return {_mm512_sub_pd(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector mul(Vector a, Vector b) { return {_mm512_mul_pd(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector max(Vector a, Vector b) { return {_mm512_max_pd(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector finite_or_zero(Vector a) {
    const __mmask8 lowest = _mm512_cmp_pd_mask(a.v, _mm512_set1_pd(-INFINITY), _CMP_EQ_OQ);
    return {_mm512_mask_mov_pd(a.v, lowest, _mm512_setzero_pd())};
  }
  GPTKERNELS_INLINE Vector exp2(Vector a) {
    alignas(64) double x[kLanes];
    store(x, a);
    for (double& e : x) e = std::exp2(e);
    return load(x);
  }
};

#elif GPTKERNELS_VECTOR_BITS == 256

template <>
struct Vector<float> {
  static constexpr int kLanes = 8, kColumns = 2, kRows = 6;
  __m256 v;
  GPTKERNELS_INLINE Vector zero() { return {_mm256_setzero_ps()}; }
  GPTKERNELS_INLINE Vector set(float x) { return {_mm256_set1_ps(x)}; }
  GPTKERNELS_INLINE Vector load(const float* p) { return {_mm256_loadu_ps(p)}; }
  GPTKERNELS_INLINE void store(float* p, Vector a) { _mm256_storeu_ps(p, a.v); }
  GPTKERNELS_INLINE Vector fma(Vector a, Vector b, Vector c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  GPTKERNELS_INLINE Vector add(Vector a, Vector b) { return {_mm256_add_ps(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector sub(Vector a, Vector b) { return {_mm256_sub_ps(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector mul(Vector a, Vector b) { return {_mm256_mul_ps(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector max(Vector a, Vector b) { return {_mm256_max_ps(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector finite_or_zero(Vector a) {
    return {_mm256_andnot_ps(_mm256_cmp_ps(a.v, _mm256_set1_ps(-INFINITY), _CMP_EQ_OQ), a.v)};
  }
  GPTKERNELS_INLINE Vector exp2(Vector a) {
    const __m256 lowest = _mm256_set1_ps(kLowestExponent);
    const __m256 x = _mm256_min_ps(_mm256_set1_ps(128.0f), _mm256_max_ps(lowest, a.v));  // NaN stays NaN
    const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 above = _mm256_cmp_ps(a.v, lowest, _CMP_NLE_UQ);  // true for NaN
    const __m256 p = _mm256_and_ps(above, power_of_fraction(Vector{_mm256_sub_ps(x, n)}).v);
    // 2^n is applied as two factors, because it may be outside float's range. Only the second product can be denormal,
    // so the result is rounded once.
    const __m256i e = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(e, 1);
    return {_mm256_mul_ps(_mm256_mul_ps(p, power(half)), power(_mm256_sub_epi32(e, half)))};
  }
  GPTKERNELS_INLINE __m256 power(__m256i e) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
  }
};

template <>
struct Vector<double> {
  static constexpr int kLanes = 4, kColumns = 2, kRows = 6;
  __m256d v;
  GPTKERNELS_INLINE Vector zero() { return {_mm256_setzero_pd()}; }
  GPTKERNELS_INLINE Vector set(double x) { return {_mm256_set1_pd(x)}; }
  GPTKERNELS_INLINE Vector load(const double* p) { return {_mm256_loadu_pd(p)}; }
  GPTKERNELS_INLINE void store(double* p, Vector a) { _mm256_storeu_pd(p, a.v); }
  GPTKERNELS_INLINE Vector fma(Vector a, Vector b, Vector c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
  GPTKERNELS_INLINE Vector add(Vector a, Vector b) { return {_mm256_add_pd(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector sub(Vector a, Vector b) { return {_mm256_sub_pd(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector mul(Vector a, Vector b) { return {_mm256_mul_pd(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector max(Vector a, Vector b) { return {_mm256_max_pd(a.v, b.v)}; }
  GPTKERNELS_INLINE Vector finite_or_zero(Vector a) {
    return {_mm256_andnot_pd(_mm256_cmp_pd(a.v, _mm256_set1_pd(-INFINITY), _CMP_EQ_OQ), a.v)};
  }
  GPTKERNELS_INLINE Vector exp2(Vector a) {
    alignas(32) double x[kLanes];
    store(x, a);
    for (double& e : x) e = std::exp2(e);
    return load(x);
  }
};

#else

template <typename A>
struct Vector {
  static constexpr int kLanes = 16 / sizeof(A), kColumns = 2, kRows = 4;
  A v[kLanes];

  template <typename Fn>
  GPTKERNELS_INLINE Vector each(const Fn& fn) {
    Vector out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = fn(i);
    return out;
  }
  GPTKERNELS_INLINE Vector zero() { return set(0); }
  GPTKERNELS_INLINE Vector set(A x) {
    return each([&](int) { return x; });
  }
  GPTKERNELS_INLINE Vector load(const A* p) {
    return each([&](int i) { return p[i]; });
  }
  GPTKERNELS_INLINE void store(A* p, Vector a) {
    for (int i = 0; i < kLanes; ++i) p[i] = a.v[i];
  }
  GPTKERNELS_INLINE Vector fma(Vector a, Vector b, Vector c) {
#ifdef __x86_64__
    return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
#else
    return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
#endif
  }
  GPTKERNELS_INLINE Vector add(Vector a, Vector b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  GPTKERNELS_INLINE Vector sub(Vector a, Vector b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
  }
  GPTKERNELS_INLINE Vector mul(Vector a, Vector b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
  }
  GPTKERNELS_INLINE Vector max(Vector a, Vector b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  GPTKERNELS_INLINE Vector finite_or_zero(Vector a) {
    return each([&](int i) { return a.v[i] == -std::numeric_limits<A>::infinity() ? A(0) : a.v[i]; });
  }
  GPTKERNELS_INLINE Vector exp2(Vector a) {
    return each([&](int i) { return std::exp2(a.v[i]); });
  }
};

#endif

template <typename A>
[[gnu::always_inline]] inline void transpose_4x4(A* to, int64_t to_ld, const A* from, int64_t from_ld) {
#if GPTKERNELS_VECTOR_BITS
  if constexpr (std::is_same_v<A, float>) {
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + from_ld);
    __m128 c = _mm_loadu_ps(from + 2 * from_ld), d = _mm_loadu_ps(from + 3 * from_ld);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a);
    _mm_storeu_ps(to + to_ld, b);
    _mm_storeu_ps(to + 2 * to_ld, c);
    _mm_storeu_ps(to + 3 * to_ld, d);
    return;
  }
#endif
  for (int64_t r = 0; r < 4; ++r)
    for (int64_t i = 0; i < 4; ++i) to[i * to_ld + r] = from[r * from_ld + i];
}

template <typename A>
void transpose(A* to, int64_t to_ld, const A* from, int64_t from_ld, int64_t rows, int64_t columns) {
  const int64_t whole_rows = rows / 4 * 4, whole_columns = columns / 4 * 4;
  for (int64_t r = 0; r < whole_rows; r += 4) {
    for (int64_t i = 0; i < whole_columns; i += 4)
      transpose_4x4(to + i * to_ld + r, to_ld, from + r * from_ld + i, from_ld);
    for (int64_t i = whole_columns; i < columns; ++i)
      for (int64_t k = r; k < r + 4; ++k) to[i * to_ld + k] = from[k * from_ld + i];
  }
  for (int64_t r = whole_rows; r < rows; ++r)
    for (int64_t i = 0; i < columns; ++i) to[i * to_ld + r] = from[r * from_ld + i];
}

template <typename A>
struct Left {
  const A* data;
  int64_t row;
  int64_t column;
};

template <int kRows, int kColumns, typename A>
[[gnu::always_inline]] inline void product_block(int64_t inner, Left<A> a, const A* b, int64_t ldb, A* c, int64_t ldc,
                                                 bool add) {
  using V = Vector<A>;
  V sums[kRows][kColumns];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < kColumns; ++n) sums[r][n] = V::zero();
  for (int64_t k = 0; k < inner; ++k) {
    V right[kColumns];
#pragma GCC unroll 8
    for (int n = 0; n < kColumns; ++n) right[n] = V::load(b + k * ldb + n * V::kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const V left = V::set(a.data[r * a.row + k * a.column]);
#pragma GCC unroll 8
      for (int n = 0; n < kColumns; ++n) sums[r][n] = V::fma(left, right[n], sums[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < kColumns; ++n) {
      A* at = c + r * ldc + n * V::kLanes;
      V::store(at, add ? V::add(V::load(at), sums[r][n]) : sums[r][n]);
    }
}

template <int kColumns, typename A>
[[gnu::noinline]] void product_columns(int64_t rows, int64_t inner, Left<A> a, const A* b, int64_t ldb, A* c,
                                       int64_t ldc, bool add) {
  constexpr int kRows = Vector<A>::kRows;
  int64_t r = 0;
  const auto at = [&] { return Left<A>{a.data + r * a.row, a.row, a.column}; };
  for (; r + kRows <= rows; r += kRows) product_block<kRows, kColumns>(inner, at(), b, ldb, c + r * ldc, ldc, add);
  switch (rows - r) {
    case 5: return product_block<5, kColumns>(inner, at(), b, ldb, c + r * ldc, ldc, add);
    case 4: return product_block<4, kColumns>(inner, at(), b, ldb, c + r * ldc, ldc, add);
    case 3: return product_block<3, kColumns>(inner, at(), b, ldb, c + r * ldc, ldc, add);
    case 2: return product_block<2, kColumns>(inner, at(), b, ldb, c + r * ldc, ldc, add);
    case 1: return product_block<1, kColumns>(inner, at(), b, ldb, c + r * ldc, ldc, add);
  }
}

// c (rows, columns) = a (rows, inner) @ b (inner, columns), or c += a @ b with `add`. `columns` is a multiple of
// kLanes. Summing in parts of `length` terms makes the rounding error grow with `length` plus the number of parts, not
// with `inner`. The bits of an element do not depend on the division of c into blocks.
template <typename A>
void product(int64_t rows, int64_t columns, int64_t inner, Left<A> a, const A* b, int64_t ldb, A* c, int64_t ldc,
             bool add, int64_t length = 64) {
  using V = Vector<A>;
  for (int64_t k = 0; k < inner; k += length, add = true) {
    const int64_t terms = std::min(length, inner - k);
    const Left<A> left = {a.data + k * a.column, a.row, a.column};
    const A* right = b + k * ldb;
    for (int64_t n = 0; n < columns;) {
      const int64_t vectors = std::min<int64_t>((columns - n) / V::kLanes, V::kColumns);
      switch (vectors) {
        case 1: product_columns<1>(rows, terms, left, right + n, ldb, c + n, ldc, add); break;
        case 2: product_columns<2>(rows, terms, left, right + n, ldb, c + n, ldc, add); break;
        case 3:
          if constexpr (V::kColumns > 2) product_columns<3>(rows, terms, left, right + n, ldb, c + n, ldc, add);
          break;
        default:
          if constexpr (V::kColumns > 2) product_columns<4>(rows, terms, left, right + n, ldb, c + n, ldc, add);
      }
      n += vectors * V::kLanes;
    }
  }
}

// n is a multiple of 16. The function computes 16 independent partial sums, and adds them pairwise.
template <typename A>
[[gnu::always_inline]] inline A dot(const A* a, const A* b, int64_t n) {
  using V = Vector<A>;
  constexpr int kVectors = 16 / V::kLanes;
  V sums[kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) sums[i] = V::zero();
  for (int64_t k = 0; k < n; k += 16)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i)
      sums[i] = V::fma(V::load(a + k + i * V::kLanes), V::load(b + k + i * V::kLanes), sums[i]);
  alignas(64) A lanes[16];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) V::store(lanes + i * V::kLanes, sums[i]);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

#undef GPTKERNELS_INLINE

}  // namespace gptkernels::cpu::GPTKERNELS_ISA
