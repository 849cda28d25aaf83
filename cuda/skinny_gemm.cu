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
// A result depends on its own row of x and on K alone, never on m or on the block it lands in.
//
//   -DSCALAR_BF16=1 | -DSCALAR_FP16=1
//   -DROW_TILES=n    16 n rows of W in a tile    -DCOLUMN_TILES=n   up to 8 n rows of x    -DSTAGES=n
//   -DGATED=1        W is [gate; up]: y = silu(x gate^T) * (x up^T); a tile has 8 n rows of each
//   -DNORMED=1       x becomes rms_norm(x) * norm_weight: the weight at once, the row's factor at the end
#include "common/dtype.cuh"
#include "common/async_copy.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "common/sm90.cuh"

#ifdef GATED
constexpr int ROW_STEP = 8;      // outputs in 16 rows of a tile
#else
constexpr int ROW_STEP = 16;
#endif
#ifdef NORMED
constexpr int NORM_PIECES = 2;
#else
constexpr int NORM_PIECES = 0;
#endif
constexpr int WARPS = 8;
constexpr int CHUNK = 64;                        // columns
constexpr int COLUMNS = 8 * COLUMN_TILES;        // rows of x, columns of the products
constexpr int W_PIECES = 4 * ROW_TILES;          // a piece: 16 bytes of every lane. [row tile][8 rows][32 columns]
constexpr int X_PIECES = 2 * COLUMN_TILES;       // [column tile][32 columns]
constexpr int PIECE = 32 * 16;
constexpr int STAGE = PIECE * (W_PIECES + X_PIECES + NORM_PIECES);
constexpr int SUM_STRIDE = 16 * ROW_TILES + 4;   // floats; 4 mod 16 keeps both directions free of conflicts
constexpr int SUMS = COLUMNS * SUM_STRIDE;       // floats of one warp: [column][row]

DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef SCALAR_FP16
  mma_fp16(c, a, b0, b1);
#else
  mma_bf16(c, a, b0, b1);
#endif
}

struct Operands {
  const scalar_t *x, *w, *norm_weight;
  int m, n, k;              // x [m, k], w [n or 2 n, k]
  int x_stride;
};

// What one warp loads next: chunk `chunk` of the tile that starts at output `first`.
struct Cursor {
  int first, chunk;
  DEV void advance(int warp, int num_chunks, int tile_rows) {
    chunk += WARPS;
    if (chunk >= num_chunks) chunk = warp, first += tile_rows;
  }
};

// `slot`: this lane's 16 bytes of the stage's first piece. Rows from `end` on are left as they are: what
// they hold goes into results that nobody reads. Columns from k on become zeros.
DEV void load_weights(const Operands& op, smem_t slot, Cursor at, int count, int lane) {
  const int g = lane >> 2, t = lane & 3;
#ifdef GATED
  const i64 eight_down = (i64)op.n * op.k;        // from a row of gate to that of up
#else
  const i64 eight_down = 8ll * op.k;
#endif
  const scalar_t* row = op.w + (i64)(at.first + g) * op.k;
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int output = i * ROW_STEP + g + (ROW_STEP == 16 ? 8 * h : 0);
      if (output >= count) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int column = at.chunk * CHUNK + half * 32 + t * 8;
        const bool valid = column < op.k;
        copy_async_16(slot + ((i * 2 + h) * 2 + half) * PIECE,
                      row + i * ROW_STEP * (i64)op.k + h * eight_down + (valid ? column : 0), valid);
      }
    }
  }
}

DEV void load_inputs(const Operands& op, smem_t slot, int chunk, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int column = chunk * CHUNK + half * 32 + t * 8;
    const bool valid = column < op.k;
    const int from = valid ? column : 0;
#pragma unroll
    for (int i = 0; i < COLUMN_TILES; i++)
      if (8 * i + g < op.m)
        copy_async_16(slot + (W_PIECES + i * 2 + half) * PIECE, op.x + (i64)(8 * i + g) * op.x_stride + from, valid);
#ifdef NORMED
    copy_async_16(slot + (W_PIECES + X_PIECES + half) * PIECE, op.norm_weight + from, valid);
#endif
  }
}

// x times the norm's weight, rounded to scalar_t as x was; adds x * x to `squares`.
DEV uint4 weighted(uint4 x, uint4 weight, float& squares) {
  u32 values[4] = {x.x, x.y, x.z, x.w};
  const u32 weights[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float x0, x1, w0, w1;
    unpack2(values[i], x0, x1);
    unpack2(weights[i], w0, w1);
    squares += x0 * x0;
    squares += x1 * x1;
    values[i] = pack2(x0 * w0, x1 * w1);
  }
  return make_uint4(values[0], values[1], values[2], values[3]);
}

typedef float Accumulators[ROW_TILES][COLUMN_TILES][4];

// One chunk. `slot` as for the loads; squares[i] is of row 8 i + g of x.
DEV void multiply(const u8* slot, Accumulators& sums, float (&squares)[COLUMN_TILES]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint4 b[COLUMN_TILES];
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++) {
      b[j] = *(const uint4*)(slot + (W_PIECES + j * 2 + half) * PIECE);
#ifdef NORMED
      b[j] = weighted(b[j], *(const uint4*)(slot + (W_PIECES + X_PIECES + half) * PIECE), squares[j]);
#endif
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
      const uint4 upper = *(const uint4*)(slot + (i * 4 + half) * PIECE);
      const uint4 lower = *(const uint4*)(slot + (i * 4 + 2 + half) * PIECE);
      const u32 first[4] = {upper.x, lower.x, upper.y, lower.y}, last[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++) {
        mma(sums[i][j], first, b[j].x, b[j].y);
        mma(sums[i][j], last, b[j].z, b[j].w);
      }
    }
  }
}

DEV float silu(float x) { return x / (1.f + exp2_fast(-1.44269504f * x)); }

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) skinny_gemm(
    scalar_t* out,                 // [m, n], may be `residual`
    const scalar_t* x, const scalar_t* w,
    const scalar_t* bias,          // [n], GATED: [2 n]; or null
    const scalar_t* residual,      // [m, n], or null
    const scalar_t* norm_weight,   // [k], NORMED only
    int m, int n, int k, int x_stride, int out_stride, int residual_stride,
    int block_rows, int tile_rows,  // outputs of a block and of a tile
    float eps)
{
  extern __shared__ __align__(128) u8 smem[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int begin = blockIdx.x * block_rows, end = min(n, begin + block_rows);
  const int num_tiles = (end - begin + tile_rows - 1) / tile_rows, num_chunks = (k + CHUNK - 1) / CHUNK;
  const int my_chunks = warp < num_chunks ? (num_chunks - warp + WARPS - 1) / WARPS : 0, my_loads = num_tiles * my_chunks;
  const Operands op{x, w, norm_weight, m, n, k, x_stride};

  u8* ring = smem + warp * (STAGES * STAGE) + lane * 16;
  const smem_t ring_address = smem_address(ring);
  float* all_sums = (float*)(smem + WARPS * STAGES * STAGE);  // [2][WARPS][SUMS]; NORMED: [2][WARPS][COLUMNS]
  auto count_at = [&](int first) { return min(tile_rows, end - first); };

  // Weights never depend on the kernel before this one, the rest may.
  Cursor next{begin, warp}, inputs = next;
  for (int s = 0; s < STAGES - 1; s++)
    if (s < my_loads) {
      load_weights(op, ring_address + s * STAGE, next, count_at(next.first), lane);
      next.advance(warp, num_chunks, tile_rows);
    }
  grid_dependency_wait();
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < my_loads) {
      load_inputs(op, ring_address + s * STAGE, inputs.chunk, lane);
      inputs.advance(warp, num_chunks, tile_rows);
    }
    copy_async_commit();
  }
  grid_dependency_launch();

  int done = 0, stage = 0;  // chunks multiplied so far, and where the next one lies
  for (int tile = 0; tile < num_tiles; tile++) {
    const int first = begin + tile * tile_rows, count = count_at(first);
    Accumulators sums = {};
    float squares[COLUMN_TILES] = {};
    for (int i = 0; i < my_chunks; i++, done++) {
      copy_async_wait<STAGES - 2>();
      const int free_stage = stage == 0 ? STAGES - 1 : stage - 1;  // read in the last iteration
      if (done + STAGES - 1 < my_loads) {
        load_weights(op, ring_address + free_stage * STAGE, next, count_at(next.first), lane);
        load_inputs(op, ring_address + free_stage * STAGE, next.chunk, lane);
        next.advance(warp, num_chunks, tile_rows);
      }
      copy_async_commit();
      multiply(ring + stage * STAGE, sums, squares);
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }

    // Two buffers, so that one barrier a tile is enough: whoever writes a buffer again has seen, at the
    // barrier in between, all threads finish reading it.
    float* tile_sums = all_sums + (tile & 1) * (WARPS * SUMS);
#ifdef NORMED
    float* tile_squares = all_sums + 2 * WARPS * SUMS + (tile & 1) * (WARPS * COLUMNS);
#endif
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++) {
#pragma unroll
      for (int i = 0; i < ROW_TILES; i++) {
        float* to = tile_sums + warp * SUMS + (8 * j + 2 * t) * SUM_STRIDE + 16 * i + g;
        to[0] = sums[i][j][0];
        to[SUM_STRIDE] = sums[i][j][1];
        to[8] = sums[i][j][2];
        to[SUM_STRIDE + 8] = sums[i][j][3];
      }
#ifdef NORMED
      const float row_squares = warp_sum<4>(squares[j]);
      if (t == 0) tile_squares[warp * COLUMNS + 8 * j + g] = row_squares;
#endif
    }
    __syncthreads();
    for (int row = warp; row < m; row += WARPS) {
      float factor = 1.f;
#ifdef NORMED
      float total = 0.f;
      for (int i = 0; i < WARPS; i++) total += tile_squares[i * COLUMNS + row];
      factor = rsqrtf(total / k + eps);
#endif
      auto result = [&](int place, int column) {  // of W's row `column`, at `place` in the tile
        float y = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) y += tile_sums[i * SUMS + row * SUM_STRIDE + place];
        y *= factor;
        return bias ? y + to_float(bias[column]) : y;
      };
      for (int i = lane; i < count; i += 32) {
        const int column = first + i;
#ifdef GATED
        const int place = i / 8 * 16 + i % 8;
        float y = silu(result(place, column)) * result(place + 8, n + column);
#else
        float y = result(i, column);
#endif
        if (residual) y += to_float(residual[(i64)row * residual_stride + column]);
        out[(i64)row * out_stride + column] = from_float(y);
      }
    }
  }
}
