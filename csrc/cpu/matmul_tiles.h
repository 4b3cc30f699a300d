// Computes out = a @ b. The columns of b are divided into panels as wide as the block of accumulators of product()
// (vector.h). A panel is packed (copied to contiguous memory) if its rows are not contiguous, are far apart, or are too
// short. The threads divide the (panel, tile) pairs. Each thread does this with its pairs:
//
//   for each panel of columns, for each 512 inner elements:
//     pack the panel
//     for each tile of 24 rows: out += a @ panel; after the last inner elements, apply the epilogue to the tile
//
// The file has no include guard, because each_instruction_set.h includes it once for each instruction set.

namespace gptkernels::cpu::GPTKERNELS_ISA {

constexpr int64_t kPanel = Vector<float>::kColumns * Vector<float>::kLanes;  // columns

struct Tile {
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t columns;
};

// to[k][j] = b(first + k, column + j). `columns` is an int64_t, or an integral_constant so that the compiler knows the
// length of the loops.
template <typename Columns>
[[gnu::always_inline]] inline void pack_columns(float* to, const Strided& b, int64_t first, int64_t terms,
                                                int64_t column, Columns columns) {
  const float* from = b.data + first * b.row + column * b.column;
  if (b.column == 1) {
    for (int64_t k = 0; k < terms; ++k)
      for (int64_t j = 0; j < columns; ++j) to[k * kPanel + j] = from[k * b.row + j];
    return;
  }
  constexpr int64_t kChunk = 16;
  int64_t k = 0;
  for (; k + kChunk <= terms; k += kChunk)
    for (int64_t j = 0; j < columns; ++j)
#pragma GCC unroll 16
      for (int64_t i = 0; i < kChunk; ++i) to[(k + i) * kPanel + j] = from[k + i + j * b.column];
  for (; k < terms; ++k)
    for (int64_t j = 0; j < columns; ++j) to[k * kPanel + j] = from[k + j * b.column];
}

[[gnu::noinline]] inline void pack(float* to, const Strided& b, int64_t first, int64_t terms, int64_t column,
                                   int64_t columns) {
  if (columns == kPanel) return pack_columns(to, b, first, terms, column, std::integral_constant<int64_t, kPanel>());
  std::fill_n(to, terms * kPanel, 0.0f);
  pack_columns(to, b, first, terms, column, columns);
}

struct Panel {
  const float* data;
  int64_t ld;
};

inline void multiply(float* out, int64_t ld, Left<float> rows, Panel panel, const Tile& tile, int64_t terms, bool add) {
  constexpr int64_t kLanes = Vector<float>::kLanes;
  if (tile.columns % kLanes == 0)
    return product(tile.rows, tile.columns, terms, rows, panel.data, panel.ld, out, ld, add, kPartTerms);
  alignas(64) float whole[kTileRows * kPanel];
  const int64_t columns = (tile.columns + kLanes - 1) / kLanes * kLanes;
  for (int64_t r = 0; r < tile.rows; ++r) {
    std::fill_n(whole + r * kPanel, kPanel, 0.0f);
    if (add) std::copy_n(out + r * ld, tile.columns, whole + r * kPanel);
  }
  product(tile.rows, columns, terms, rows, panel.data, panel.ld, whole, kPanel, add, kPartTerms);
  for (int64_t r = 0; r < tile.rows; ++r) std::copy_n(whole + r * kPanel, tile.columns, out + r * ld);
}

template <typename Columns>
[[gnu::always_inline]] inline void finish_columns(const Matmul& p, const Tile& tile, Columns columns) {
  for (int64_t r = tile.row; r < tile.row + tile.rows; ++r) {
    float* out = p.out + r * p.out_ld + tile.column;
    const int64_t at = r * p.columns + tile.column;
    float* to = p.pre_gelu ? p.pre_gelu + at : out;
    if (p.bias) {
      const float* bias = p.bias + tile.column;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) to[i] += bias[i];
    }
    if (p.pre_gelu) {
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) out[i] = GeluTanh::value(to[i]);
    }
    if (p.dgelu_at) {
      const float* x = p.dgelu_at + at;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) out[i] *= GeluTanh::derivative(x[i]);
    }
  }
  if (!p.column_sums) return;
  double* sums = static_cast<double*>(p.workspace) + tile.row / kTileRows * p.columns + tile.column;
  std::fill_n(sums, columns, 0.0);
  for (int64_t r = tile.row; r < tile.row + tile.rows; ++r) {
    const float* out = p.out + r * p.out_ld + tile.column;
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) sums[i] += double(out[i]);
  }
}

[[gnu::noinline, gnu::flatten]] inline void finish(const Matmul& p, const Tile& tile) {
  if (tile.columns == kPanel) return finish_columns(p, tile, std::integral_constant<int64_t, kPanel>());
  finish_columns(p, tile, tile.columns);
}

// The rows of a tile are too short and too far apart for the hardware prefetcher.
template <typename T>
[[gnu::always_inline]] inline void prefetch(T* matrix, int64_t ld, const Tile& tile) {
  if (!matrix) return;
  for (int64_t r = 0; r < tile.rows; ++r)
    for (int64_t i = 0; i < tile.columns; i += 16)
      __builtin_prefetch(matrix + (tile.row + r) * ld + tile.column + i, !std::is_const_v<T>);
}

[[gnu::noinline]] inline void panel_rows(const Matmul& p, int64_t column, int64_t begin, int64_t end) {
  alignas(64) float packed[kPanelTerms * kPanel];
  const bool finishes = p.bias || p.pre_gelu || p.dgelu_at || p.column_sums;
  float* to = p.pre_gelu ? p.pre_gelu : p.out;
  const int64_t ld = p.pre_gelu ? p.columns : p.out_ld;
  const int64_t columns = std::min(kPanel, p.columns - column);
  const bool packs = p.b.column != 1 || columns < kPanel || p.b.row > kMaxUnpackedStride;
  for (int64_t first = 0; first < p.inner; first += kPanelTerms) {
    const int64_t terms = std::min(kPanelTerms, p.inner - first);
    const bool last = first + terms == p.inner;
    if (packs) pack(packed, p.b, first, terms, column, columns);
    const Panel panel = packs ? Panel{packed, kPanel} : Panel{p.b.data + first * p.b.row + column, p.b.row};
    Tile tile{.row = begin, .rows = 0, .column = column, .columns = columns};
    for (; tile.row < end; tile.row += tile.rows) {
      tile.rows = std::min(kTileRows, end - tile.row);
      prefetch(p.out, p.out_ld, tile);
      if (last) prefetch(p.pre_gelu, p.columns, tile);
      if (last) prefetch(p.dgelu_at, p.columns, tile);
      multiply(to + tile.row * ld + column, ld,
               Left<float>{p.a.data + tile.row * p.a.row + first * p.a.column, p.a.row, p.a.column}, panel, tile, terms,
               p.accumulate || first > 0);
      if (finishes && last) finish(p, tile);
    }
  }
}

// The range is in panel-major order, so that a panel is packed once for all its tiles in the range.
inline void matmul_range(const Matmul& p, int64_t begin, int64_t end) {
  const int64_t tiles = tiles_of(p.rows);
  while (begin < end) {
    const int64_t panel = begin / tiles, next = std::min(end, (panel + 1) * tiles);
    const int64_t first = begin % tiles * kTileRows, last = (begin % tiles + next - begin) * kTileRows;
    panel_rows(p, panel * kPanel, first, std::min(last, p.rows));
    begin = next;
  }
}

inline void matmul_tiles(const Matmul& p, Stream stream) {
  const int64_t panels = (p.columns + kPanel - 1) / kPanel;
  parallel_for(stream, panels * tiles_of(p.rows), kTileRows * p.inner,
               [&](int64_t begin, int64_t end) { matmul_range(p, begin, end); });
}

}  // namespace gptkernels::cpu::GPTKERNELS_ISA
