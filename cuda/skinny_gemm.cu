// y = x W^T for a few rows x, bound by reading W once: see engine/ops/skinny_gemm.py.
//
// A persistent block owns a range of rows of W and walks it in tiles of `tile_rows`; its eight warps split
// K: warp w takes the chunks of 64 columns w, w + 8, ... A warp's chunks, of all tiles one after another,
// flow through its ring of STAGES stages in shared memory, so that loads never stop at a tile's end.
//
//   W [tile rows, 64] --cp.async--> ring --> A fragments, W rows as M  \
//   x [m, 64]         --cp.async--> ring --> B fragments, x rows as N  /  mma m16n8k16, sums in registers
//   end of a tile: sums of the eight warps through shared memory, added in order of the warps
//
// The order of k within a chunk is free as long as W and x agree: a lane takes 8 neighbours (16 bytes)
// where the fragment layout says 2 + 2 + 2 + 2. So each lane copies exactly the bytes that it will read,
// the ring needs neither barriers nor swizzles, and no lane waits for another before a tile's end.
//
//   lane 4 g + t   rows g and g + 8 of 16, columns 8 t ... 8 t + 7 of 32: products 1 (first 4), 2 (last 4)
//
// The first stages of W are on their way before the kernel ahead has ended. The x that goes with them comes
// through registers: copies end in the order they began, so one behind them would wait for all of them.
//
// A result depends on its own row of x and on K alone, never on m or on the block it lands in.
//
//   -DSCALAR_BF16=1 | -DSCALAR_FP16=1
//   -DEIGHTS=n         up to 8 n rows of W in a tile    -DCOLUMN_TILES=n   up to 8 n rows of x
//   -DSTAGES=n         of the ring
//   -DREFILLS=0|1      0: no warp has more chunks than stages, so all are loaded at the start
//   -DX_CHUNKS=n       > 0: a warp's chunks of x, at most n, stay in shared memory instead of in the ring,
//                      for all tiles
//   -DGATED=1          16 rows of W are 8 of gate, 8 of up: y = silu(x gate^T) * (x up^T)
//   -DNORMED=1         each row of the product is divided by sqrt(mean(x^2) + eps) of its row of x
//   -DFLOAT_OUT=1      results are float32
#include "common/dtype.cuh"
#include "common/async_copy.cuh"
#include "common/dependent_launch.cuh"
#include "common/gate.cuh"
#include "common/mma.cuh"
#include "common/vec.cuh"

#ifdef GATED
constexpr int FACTORS = 2;                        // rows of W to an output
constexpr int UNIT = 16;                          // rows of W that stay in one tile
static_assert(EIGHTS % 2 == 0, "gate and up lie in one tile");
#else
constexpr int FACTORS = 1;
constexpr int UNIT = 1;
#endif
#ifdef NORMED
constexpr bool IS_NORMED = true;
#else
constexpr bool IS_NORMED = false;
#endif
#ifdef FLOAT_OUT
typedef float result_t;
DEV result_t to_result(float x) { return x; }
#else
typedef scalar_t result_t;
DEV result_t to_result(float x) { return from_float(x); }
#endif
constexpr int WARPS = 8;
constexpr int CHUNK = 64;                         // columns
constexpr int ROW_TILES = (EIGHTS + 1) / 2;       // of 16 rows of W
constexpr int COLUMNS = 8 * COLUMN_TILES;         // rows of x, columns of the products
constexpr int PIECE = 32 * 16;                    // 16 bytes of every lane
constexpr int W_CHUNK = PIECE * 2 * EIGHTS;       // [8 rows][32 columns]
constexpr int X_CHUNK = PIECE * 2 * COLUMN_TILES;  // [column tile][32 columns]
constexpr bool KEEPS_X = X_CHUNKS > 0;
constexpr int STAGE = W_CHUNK + (KEEPS_X ? 0 : X_CHUNK);
constexpr int AHEAD = STAGES - REFILLS;           // chunks under way while one is multiplied
constexpr int X_AHEAD = KEEPS_X ? X_CHUNKS : AHEAD;  // chunks of x that come through registers
constexpr int SUM_STRIDE = 8 * EIGHTS + 4;        // floats; 4 times an odd number: no bank conflicts either way
constexpr int SUMS = COLUMNS * SUM_STRIDE;        // floats of one warp: [column][row]
constexpr int SQUARES = IS_NORMED ? WARPS * COLUMNS : 0;  // floats: [warp][column]
constexpr int MEMORY = 4 * (2 * WARPS * SUMS + SQUARES) + WARPS * (X_CHUNKS * X_CHUNK + STAGES * STAGE);
// A block that leaves half of the memory to the next kernel (HALF_SMEM) leaves half of the registers, too.
constexpr int BLOCKS_OF_SM = COLUMN_TILES == 1 && MEMORY <= 113 * 1024 ? 2 : 1;
constexpr int PER_LANE = (8 * EIGHTS / FACTORS + 31) / 32;  // outputs of a lane in a tile and a row of x
static_assert(AHEAD >= 1, "a stage that is read cannot be loaded at the same time");

DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef SCALAR_FP16
  mma_fp16(c, a, b0, b1);
#else
  mma_bf16(c, a, b0, b1);
#endif
}

struct Operands {
  const scalar_t *x, *w;
  int m, k;              // x [m, k], w [.., k]
  int x_stride;
};

// What one warp loads next: chunk `chunk` of the tile that starts at row `first` of W; nothing from the
// block's end on.
struct Cursor {
  int first, chunk;
  DEV void advance(int warp, int num_chunks, int tile_rows) {
    chunk += WARPS;
    if (chunk >= num_chunks) chunk = warp, first += tile_rows;
  }
};

// `slot`: this lane's 16 bytes of the chunk's first piece. Rows from `count` on are left as they are: what
// they hold goes into results that nobody reads. Columns from k on become zeros.
DEV void load_weights(const Operands& op, smem_t slot, Cursor at, int count, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const scalar_t* row = op.w + (i64)(at.first + g) * op.k;
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) {
    if (8 * i + g >= count) continue;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = at.chunk * CHUNK + half * 32 + t * 8;
      const bool valid = column < op.k;
      copy_async_16(slot + (i * 2 + half) * PIECE, row + i * (8ll * op.k) + (valid ? column : 0), valid);
    }
  }
}

DEV void load_inputs(const Operands& op, smem_t slot, int chunk, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int column = chunk * CHUNK + half * 32 + t * 8;
    const bool valid = column < op.k;
#pragma unroll
    for (int i = 0; i < COLUMN_TILES; i++)
      if (8 * i + g < op.m)
        copy_async_16(slot + (i * 2 + half) * PIECE, op.x + (i64)(8 * i + g) * op.x_stride + (valid ? column : 0), valid);
  }
}

// A chunk of x on its way through registers. Rows from m on are zeros.
struct InputChunk {
  uint4 pieces[2 * COLUMN_TILES];

  DEV void load(const Operands& op, int chunk, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < COLUMN_TILES; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = 8 * i + g, column = chunk * CHUNK + half * 32 + t * 8;
        uint4& piece = pieces[i * 2 + half];
        piece = make_uint4(0, 0, 0, 0);
        if (row < op.m && column < op.k) piece = load16(op.x + (i64)row * op.x_stride + column);
      }
  }
  DEV void store(u8* slot) const {
#pragma unroll
    for (int i = 0; i < 2 * COLUMN_TILES; i++) store16(slot + i * PIECE, pieces[i]);
  }
};

typedef float Accumulators[ROW_TILES][COLUMN_TILES][4];

// One chunk: W's at `slot`, x's at `x_slot`. The halves of a chunk are summed apart, as a product waits for
// the one before it that adds to the same sums.
DEV void multiply(const u8* slot, const u8* x_slot, Accumulators (&sums)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint4 b[COLUMN_TILES];
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++) b[j] = load16(x_slot + (j * 2 + half) * PIECE);
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
      const uint4 upper = load16(slot + (i * 4 + half) * PIECE);
      uint4 lower = make_uint4(0, 0, 0, 0);
      if (2 * i + 1 < EIGHTS) lower = load16(slot + (i * 4 + 2 + half) * PIECE);
      const u32 first[4] = {upper.x, lower.x, upper.y, lower.y}, last[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++) {
        mma(sums[half][i][j], first, b[j].x, b[j].y);
        mma(sums[half][i][j], last, b[j].z, b[j].w);
      }
    }
  }
}

// x x^T of each column tile, of whose diagonal the squares' sums are: what is B to the product (rows of x as
// N) is the upper half of A as well (rows of x as M).
typedef float Squares[COLUMN_TILES][4];

DEV void add_squares(const u8* x_slot, Squares (&squares)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++) {
      const uint4 b = load16(x_slot + (j * 2 + half) * PIECE);
      const u32 first[4] = {b.x, 0, b.y, 0}, last[4] = {b.z, 0, b.w, 0};
      mma(squares[half][j], first, b.x, b.y);
      mma(squares[half][j], last, b.z, b.w);
    }
}

// Where in a tile the row of W lies that output `i` of the tile is made of (GATED: its gate's; up's is 8 on).
DEV int place_of(int i) { return FACTORS == 2 ? i / 8 * 16 + i % 8 : i; }

// What is added to a lane's outputs of one tile: fetched long before they are there. Warp w has the rows
// w, w + 8, ... of x, lane l the outputs l, l + 32, ...
struct Addends {
  scalar_t bias[PER_LANE][FACTORS], residual[COLUMN_TILES][PER_LANE];

  // of the tile that starts at row `first` of W and has `count`
  DEV void load_bias(const scalar_t* from, int first, int count, int lane) {
    if (from == nullptr) return;
#pragma unroll
    for (int p = 0; p < PER_LANE; p++) {
      const int place = place_of(lane + 32 * p);
#pragma unroll
      for (int f = 0; f < FACTORS; f++)
        if (place < count) bias[p][f] = from[first + place + 8 * f];
    }
  }
  DEV void load_residual(const scalar_t* from, int stride, int m, int first, int count, int warp, int lane) {
    if (from == nullptr) return;
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
      for (int p = 0; p < PER_LANE; p++) {
        const int row = warp + WARPS * j, i = lane + 32 * p;
        if (row < m && i < count / FACTORS) residual[j][p] = from[(i64)row * stride + first / FACTORS + i];
      }
  }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_OF_SM) skinny_gemm(
    result_t* out,             // [m, outputs], may be `residual`
    const scalar_t* x,
    const scalar_t* w,         // [rows, k]
    const scalar_t* bias,      // [rows], or null
    const scalar_t* residual,  // [m, outputs], or null
    int m, int k, int x_stride, int out_stride, int residual_stride,
    int block_units,           // of UNIT rows of W: of each block
    int larger_blocks,         // the first ones, which have one unit more
    int tile_rows,             // of W, a multiple of UNIT
    float eps)                 // NORMED
{
  extern __shared__ __align__(128) u8 smem[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, block = blockIdx.x;
  const int begin = UNIT * (block * block_units + min(block, larger_blocks));
  const int end = begin + UNIT * (block_units + (block < larger_blocks));
  const int num_chunks = (k + CHUNK - 1) / CHUNK, my_chunks = (num_chunks - warp + WARPS - 1) / WARPS;
  const float inverse_k = reciprocal_fast((float)k);
  const Operands op{x, w, m, k, x_stride};
  auto count_at = [&](int first) { return min(tile_rows, end - first); };

  float* all_sums = (float*)smem;                    // [2][WARPS][SUMS]
  float* all_squares = all_sums + 2 * WARPS * SUMS;  // NORMED: [WARPS][COLUMNS]
  u8* chunks_of_x = (u8*)(all_squares + SQUARES);         // [WARPS][X_CHUNKS]
  u8* stages = chunks_of_x + WARPS * X_CHUNKS * X_CHUNK;  // [STAGES][WARPS]
  u8* kept_x = chunks_of_x + warp * (X_CHUNKS * X_CHUNK) + lane * 16;  // this lane's
  u8* ring = stages + warp * STAGE + lane * 16;
  const smem_t ring_address = smem_address(ring);

  // Weights never depend on the kernel before this one, the rest may.
  Cursor next{my_chunks > 0 ? begin : end, warp}, inputs = next;
#pragma unroll
  for (int s = 0; s < AHEAD; s++) {
    if (next.first < end) {
      load_weights(op, ring_address + s * (WARPS * STAGE), next, count_at(next.first), lane);
      next.advance(warp, num_chunks, tile_rows);
    }
    copy_async_commit();
  }
  Addends addends = {};
  addends.load_bias(bias, begin, count_at(begin), lane);
  grid_dependency_wait();
  InputChunk chunks[X_AHEAD];
  bool has_chunk[X_AHEAD];
#pragma unroll
  for (int s = 0; s < X_AHEAD; s++) {
    has_chunk[s] = KEEPS_X ? inputs.first == begin : inputs.first < end;
    if (!has_chunk[s]) continue;
    chunks[s].load(op, inputs.chunk, lane);
    inputs.advance(warp, num_chunks, tile_rows);
  }
  addends.load_residual(residual, residual_stride, m, begin, count_at(begin), warp, lane);
  grid_dependency_launch();
#pragma unroll
  for (int s = 0; s < X_AHEAD; s++)
    if (has_chunk[s]) chunks[s].store(KEEPS_X ? kept_x + s * X_CHUNK : ring + s * (WARPS * STAGE) + W_CHUNK);

  int stage = 0, buffer = 0;
  for (int first = begin; first < end; first += tile_rows, buffer ^= 1) {
    const bool is_first = first == begin;
    const int count = count_at(first);
    Accumulators sums[2] = {};
    Squares squares[2] = {};
    for (int i = 0; i < my_chunks; i++) {
      copy_async_wait<AHEAD - 1>();
      if (REFILLS && next.first < end) {
        const int free_stage = stage == 0 ? STAGES - 1 : stage - 1;  // read in the last iteration
        const smem_t slot = ring_address + free_stage * (WARPS * STAGE);
        load_weights(op, slot, next, count_at(next.first), lane);
        if (!KEEPS_X) load_inputs(op, slot + W_CHUNK, next.chunk, lane);
        next.advance(warp, num_chunks, tile_rows);
      }
      copy_async_commit();
      const u8* slot = ring + stage * (WARPS * STAGE);
      const u8* x_slot = KEEPS_X ? kept_x + i * X_CHUNK : slot + W_CHUNK;
      multiply(slot, x_slot, sums);
      if (IS_NORMED && is_first) add_squares(x_slot, squares);
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }

    // Two buffers, so that one barrier a tile is enough: whoever writes a buffer again has seen, at the
    // barrier in between, all threads finish reading it.
    float* tile_sums = all_sums + buffer * (WARPS * SUMS);
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++) {
#pragma unroll
      for (int i = 0; i < ROW_TILES; i++) {
        float* to = tile_sums + warp * SUMS + (8 * j + 2 * t) * SUM_STRIDE + 16 * i + g;
        to[0] = sums[0][i][j][0] + sums[1][i][j][0];
        to[SUM_STRIDE] = sums[0][i][j][1] + sums[1][i][j][1];
        if (2 * i + 1 >= EIGHTS) continue;
        to[8] = sums[0][i][j][2] + sums[1][i][j][2];
        to[SUM_STRIDE + 8] = sums[0][i][j][3] + sums[1][i][j][3];
      }
      if (IS_NORMED && is_first && t == g / 2)  // who has columns 2 t and 2 t + 1 of row g
        all_squares[warp * COLUMNS + 8 * j + g] = g % 2 ? squares[0][j][1] + squares[1][j][1]
                                                        : squares[0][j][0] + squares[1][j][0];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++) {
      const int row = warp + WARPS * j;
      if (row >= m) break;
      auto over_warps = [&](const float* sums, int stride) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += sums[i * stride];
        return sum;
      };
      const float factor = IS_NORMED ? rsqrtf(over_warps(all_squares + row, COLUMNS) * inverse_k + eps) : 1.f;
#pragma unroll
      for (int p = 0; p < PER_LANE; p++) {
        const int i = lane + 32 * p, place = place_of(i);
        if (place >= count) continue;
        float y[FACTORS];  // GATED: gate's, up's
#pragma unroll
        for (int f = 0; f < FACTORS; f++) y[f] = over_warps(tile_sums + row * SUM_STRIDE + place + 8 * f, SUMS);
#pragma unroll
        for (int f = 0; f < FACTORS; f++) y[f] = y[f] * factor + to_float(addends.bias[p][f]);
        if (FACTORS == 2) y[0] = silu(y[0]) * y[FACTORS - 1];
        out[(i64)row * out_stride + first / FACTORS + i] = to_result(y[0] + to_float(addends.residual[j][p]));
      }
    }
    const int then = first + tile_rows;
    if (then < end) {
      addends.load_bias(bias, then, count_at(then), lane);
      addends.load_residual(residual, residual_stride, m, then, count_at(then), warp, lane);
    }
  }
}
