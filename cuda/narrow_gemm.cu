// y = x W^T for up to 64 rows x, bound by reading W: see engine/ops/narrow_gemm.py.
//
// What limits more rows than a handful is how often x is read, once for each tile of rows of W: tiles
// should be high. But then there are fewer of them than SMs. So a tile is given to a cluster of CLUSTER
// blocks, each of which takes a part of K; at its end they send each other their sums, of some results to each
// block, which adds them in order of the blocks:
//
//                     K  ----->
//   tile_rows of W  |  block 0  |  block 1  |  block 2  |  block 3  |   a cluster takes tile i, i + number
//   next tile       |  block 4  |  ...                                  of clusters, ...
//
// A block streams chunks of CHUNK columns of W and x through a ring of STAGES stages, which does not stop
// at a tile's end. Half of its warps copy W, the others x: as a thread's copies arrive in order, W may then
// be fetched before x exists. The warps stand in a grid, WARPS_N over the rows of a tile and WARPS_K over
// the columns of a chunk; each holds products of its rows with all rows of x:
//
//   W [16 ROW_TILES, 16]    ldmatrix --> A fragments, W rows as M  \
//   x [8 COLUMN_TILES, 16]  ldmatrix --> B fragments, x rows as N  /  mma m16n8k16, sums in registers
//
// Of 16 rows of W the even ones are the first 8 rows of A and the odd ones the last 8, so that the sums of
// lane 4 g + t are of neighbours: rows 2 g and 2 g + 1 of W with rows 2 t and 2 t + 1 of x. GATED, they are
// in their own order: 8 rows of gate, then 8 of up, so that a lane has both factors of output g.
//
// NORMED, the tensor cores sum the squares of x as well: 16 rows of x are A, 8 of them B, and the diagonals of
// the products are wanted. The 16 rows and the steps of a chunk are dealt out to all warps. All tiles have the
// same x, so this is done beside the first one.
//
//   -DSCALAR_BF16=1 | -DSCALAR_FP16=1
//   -DROW_TILES=n -DWARPS_N=n -DWARPS_K=n   tiles of up to 16 ROW_TILES WARPS_N rows of W; 8 warps in all
//   -DCOLUMN_TILES=2 | 4 | 8                up to 8 n rows of x
//   -DCHUNK=64 | 128 | 256                  columns, a multiple of 16 WARPS_K
//   -DSTAGES=n -DCLUSTER=n
//   -DNORMED=1                              rows of y times 1 / sqrt(mean(x^2) + eps), before the bias
//   -DGATED=1                               y = silu(gate) * up, with W interleaved by eights
//   -DFLOAT_OUT=1                           results are float32
#ifndef NORMED
#define NORMED 0
#endif
#include "common/dtype.cuh"
#include "common/async_copy.cuh"
#include "common/cluster.cuh"
#include "common/cluster_send.cuh"
#include "common/dependent_launch.cuh"
#include "common/gate.cuh"
#include "common/mma.cuh"

constexpr int WARPS = WARPS_N * WARPS_K, THREADS = 32 * WARPS, LOADERS = THREADS / 2;
constexpr int WARP_ROWS = 16 * ROW_TILES;       // of W
constexpr int TILE_ROWS = WARP_ROWS * WARPS_N;
constexpr int COLUMNS = 8 * COLUMN_TILES;       // rows of x, columns of the products
constexpr int PIECES = CHUNK / 8;               // 16 bytes each, of a row
constexpr int ROW_BYTES = 2 * CHUNK;
constexpr int W_BYTES = TILE_ROWS * ROW_BYTES;
constexpr int STAGE = W_BYTES + COLUMNS * ROW_BYTES;
constexpr int STEPS = CHUNK / (16 * WARPS_K);   // of 16 columns, for each warp
constexpr int FRAGMENTS = ROW_TILES * COLUMN_TILES;        // of a warp's sums: 16 x 8 numbers
constexpr int ALL_FRAGMENTS = WARPS_N * FRAGMENTS;         // of a tile: [16 rows of W][8 rows of x]
constexpr int ROWS_AT_ONCE = LOADERS / PIECES;             // that the copying threads cover
static_assert(WARPS == 8 && COLUMN_TILES % 2 == 0 && CHUNK % (16 * WARPS_K) == 0, "see above");
static_assert(TILE_ROWS % ROWS_AT_ONCE == 0 && COLUMNS % ROWS_AT_ONCE == 0, "copies come out even");

// A tile's fragments are dealt out to the warps of the cluster's blocks, those of one column to a warp.
constexpr int DEALT = CLUSTER * WARPS, ROW_STEP = DEALT / COLUMN_TILES;
constexpr int ITEMS = (ALL_FRAGMENTS + DEALT - 1) / DEALT;  // at most, for a warp
static_assert(DEALT % COLUMN_TILES == 0, "at most 64 rows of x");
static_assert(COLUMN_TILES % CLUSTER == 0, "all blocks receive sums of each tile, which keeps them in step");

constexpr int X_TILES = COLUMN_TILES / 2, SHARES = WARPS / X_TILES;  // of 16 rows; warps that share one

#ifdef GATED
constexpr int OUTPUTS = 8, PAIRS = 1;  // of 16 rows of W; of them with 8 of x, pairs that a lane stores
#else
constexpr int OUTPUTS = 16, PAIRS = 2;
#endif

#ifdef FLOAT_OUT
typedef float result_t;
DEV void store_pair(result_t* to, float a, float b) { *(float2*)to = make_float2(a, b); }
#else
typedef scalar_t result_t;
DEV void store_pair(result_t* to, float a, float b) { *(u32*)to = pack2(a, b); }
#endif

DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef SCALAR_FP16
  mma_fp16(c, a, b0, b1);
#else
  mma_bf16(c, a, b0, b1);
#endif
}
DEV float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
template <int COUNT> DEV float4 add_up(const float4* parts, int stride) {  // in their order
  float4 total = parts[0];
#pragma unroll
  for (int i = 1; i < COUNT; i++) total = plus(total, parts[i * stride]);
  return total;
}

struct Operands {
  const scalar_t *x, *w;
  int m, n, k, x_stride, tile_rows;
};

// What a block copies next: a chunk of its range of a tile.
struct Cursor {
  int tile, chunk;
  DEV void advance(int first_chunk, int last_chunk, int num_clusters) {
    if (chunk++ == last_chunk) chunk = first_chunk, tile += num_clusters;
  }
};

// Rows from the tile's end, or from m, on are left as they are: what they hold goes into sums that nobody
// reads. Columns from k on become zeros, in W and in x. `loader`: number among the LOADERS threads.
//
// The eight lanes of an ldmatrix must find eight different banks of 16 bytes: pieces are exchanged by the
// number of the row among the eight that are loaded together.
#ifdef GATED
DEV int weight_row(int half, int j) { return 8 * half + j; }  // row j of an eighth of A, among 16 of W
DEV int exchange_of(int row) { return row & 7; }
#else
DEV int weight_row(int half, int j) { return 2 * j + half; }
DEV int exchange_of(int row) { return row >> 1 & 7; }
#endif

DEV void load_weights(const Operands& op, smem_t stage, Cursor at, int loader) {
  const int row = loader / PIECES, piece = loader % PIECES, column = at.chunk * CHUNK + piece * 8;
  const bool valid = column < op.k;
  const int first = at.tile * op.tile_rows, count = min(op.tile_rows, op.n - first);
  const scalar_t* from = op.w + (i64)(first + row) * op.k + (valid ? column : 0);
#pragma unroll
  for (int i = 0; i < TILE_ROWS / ROWS_AT_ONCE; i++) {
    const int r = i * ROWS_AT_ONCE + row;
    if (r < count)
      copy_async_16(stage + r * ROW_BYTES + ((piece ^ exchange_of(r)) << 4), from + (i64)i * ROWS_AT_ONCE * op.k, valid);
  }
}

DEV void load_inputs(const Operands& op, smem_t stage, int chunk, int loader) {
  const int row = loader / PIECES, piece = loader % PIECES, column = chunk * CHUNK + piece * 8;
  const bool valid = column < op.k;
  const scalar_t* from = op.x + (i64)row * op.x_stride + (valid ? column : 0);
#pragma unroll
  for (int i = 0; i < COLUMNS / ROWS_AT_ONCE; i++) {
    const int r = i * ROWS_AT_ONCE + row;
    if (r < op.m)
      copy_async_16(stage + W_BYTES + r * ROW_BYTES + ((piece ^ (r & 7)) << 4),
                    from + (i64)i * ROWS_AT_ONCE * op.x_stride, valid);
  }
}

typedef float Sums[FRAGMENTS][4];  // [row tile][column tile]

// One chunk. Row j of ldmatrix's matrix q is at the address of lane 8 q + j. A: the first 8 columns of its two
// halves of W's rows, then the last 8 columns of both. B: columns 0 to 7 and 8 to 15 of 8 rows of x, then of
// the next 8.
DEV void multiply(smem_t stage, int warp_n, int warp_k, int lane, Sums& sums) {
  const int q = lane >> 3, j = lane & 7;
  const smem_t w_row = stage + (warp_n * WARP_ROWS + weight_row(q & 1, j)) * ROW_BYTES;
  const smem_t x_row = stage + W_BYTES + ((q >> 1) * 8 + j) * ROW_BYTES;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const int piece = 2 * (warp_k * STEPS + step);
    u32 b[COLUMN_TILES / 2][4];
#pragma unroll
    for (int c = 0; c < COLUMN_TILES / 2; c++)
      ldmatrix_x4(b[c], x_row + c * 16 * ROW_BYTES + (((piece + (q & 1)) ^ j) << 4));
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      u32 a[4];
      ldmatrix_x4(a, w_row + r * 16 * ROW_BYTES + (((piece + (q >> 1)) ^ j) << 4));
#pragma unroll
      for (int c = 0; c < COLUMN_TILES / 2; c++) {
        mma(sums[r * COLUMN_TILES + 2 * c], a, b[c][0], b[c][1]);
        mma(sums[r * COLUMN_TILES + 2 * c + 1], a, b[c][2], b[c][3]);
      }
    }
  }
}

// The same of x with itself: adds to squares[0] the products of a warp's 16 rows with the first 8 of them, to
// squares[1] those with the last 8. Of a chunk's steps a warp takes every SHARES-th.
typedef float Squares[2][4];
DEV void multiply_inputs(smem_t stage, int warp, int lane, Squares& squares) {
  const int q = lane >> 3, j = lane & 7;
  const smem_t x_row = stage + W_BYTES + (warp % X_TILES * 16 + (q >> 1) * 8 + j) * ROW_BYTES;
#pragma unroll
  for (int i = 0; i < (CHUNK / 16 + SHARES - 1) / SHARES; i++) {
    const int step = i * SHARES + warp / X_TILES;
    if (step >= CHUNK / 16) break;
    u32 b[4];
    ldmatrix_x4(b, x_row + (((2 * step + (q & 1)) ^ j) << 4));
    const u32 a[4] = {b[0], b[2], b[1], b[3]};
    mma(squares[0], a, b[0], b[1]);
    mma(squares[1], a, b[2], b[3]);
  }
}

// To all_squares [SHARES][COLUMNS]. Row g meets itself in column g: of both halves, in lane 4 g + g / 2.
DEV void store_squares(const Squares& squares, float* all_squares, int warp, int lane) {
  const int g = lane >> 2;
  if ((lane & 3) != g / 2) return;
  float* to = all_squares + warp / X_TILES * COLUMNS + warp % X_TILES * 16 + g;
  to[0] = g & 1 ? squares[0][1] : squares[0][0];
  to[8] = g & 1 ? squares[1][3] : squares[1][2];
}

// 1 / sqrt(mean(x^2) + eps) of rows `column` and `column + 1` of x, by their squares in [PARTS][COLUMNS].
template <int PARTS> DEV float2 norm_factors(const float* squares, int column, int k, float eps) {
  const float4 four = add_up<PARTS>((const float4*)(squares + (column & ~3)), COLUMNS / 4);
  const bool last = column & 2;
  return make_float2(rsqrtf((last ? four.z : four.x) / k + eps), rsqrtf((last ? four.w : four.y) / k + eps));
}

// Where results go, and what they are added to; outputs are columns of out and residual.
struct Epilogue {
  result_t* out;
  const scalar_t *bias, *residual;
  int m, out_stride, residual_stride;
};

// A lane's share of the results of 16 rows of W with 8 of x: pairs of neighbouring outputs, for a row of x or
// two. Made before the sums are complete, as what it loads takes some time to come.
struct Share {
  int output, row;  // of the first pair
  bool valid[PAIRS];
  u32 biases, residuals[PAIRS];
};

// `first`: of the 16 rows of W, none of which is wanted from `end` on. `column`: first of the lane's two rows of x.
DEV Share load_share(const Epilogue& to, int first, int end, int column, int lane) {
  const int g = lane >> 2;
  Share share;
#ifdef GATED
  share.output = first / 2 + (g & ~1), share.row = column + (g & 1);
  const bool wanted = first < end;
  share.biases = wanted && to.bias ? to.bias[first + g] | (u32)to.bias[first + 8 + g] << 16 : 0;
#else
  share.output = first + 2 * g, share.row = column;
  const bool wanted = share.output < end;
  share.biases = wanted && to.bias ? *(const u32*)(to.bias + share.output) : 0;
#endif
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    share.valid[i] = wanted && share.row + i < to.m;
    const bool added = share.valid[i] && to.residual;
    share.residuals[i] = added ? *(const u32*)(to.residual + (i64)(share.row + i) * to.residual_stride + share.output) : 0;
  }
  return share;
}

// y: the lane's sums of a fragment. All lanes of the warp call together.
DEV void store_share(const Epilogue& to, const Share& share, float4 y, float2 factors, int lane) {
  float b0, b1;
  unpack2(share.biases, b0, b1);
  if (NORMED) y = make_float4(y.x * factors.x, y.y * factors.y, y.z * factors.x, y.w * factors.y);
#ifdef GATED
  // Output g for both rows of x. Lanes of g and g + 1 swap, so that the first has both for the first row.
  const float one = silu(y.x + b0) * (y.z + b1), other = silu(y.y + b0) * (y.w + b1);
  const bool second = lane & 4;
  const float got = __shfl_xor_sync(~0u, second ? one : other, 4);
  const float results[PAIRS][2] = {{second ? got : one, second ? other : got}};
#else
  const float results[PAIRS][2] = {{y.x + b0, y.z + b1}, {y.y + b0, y.w + b1}};
#endif
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    float r0, r1;
    unpack2(share.residuals[i], r0, r1);
    if (share.valid[i])
      store_pair(to.out + (i64)(share.row + i) * to.out_stride + share.output, results[i][0] + r0, results[i][1] + r1);
  }
}

// What lies in shared memory behind the ring. A fragment is 32 lanes' float4.
//
//   exchange   [ALL_FRAGMENTS][WARPS_K]   of a tile, as the warps have them that share its rows of W
//   squares    [SHARES][COLUMNS]          NORMED: of x, as the warps have them
//
// CLUSTER > 1: what the blocks send, of even and odd tiles in turn. A block sends of tile i + 2 when it has received
// all of tile i + 1, and that has been sent behind the barriers that follow the reads of tile i.
//
//   received   [2][ALL_FRAGMENTS / CLUSTER][CLUSTER]
//   received_squares  [CLUSTER][COLUMNS]
//   barriers   [2]
struct Exchange {
  static constexpr int RECEIVED = CLUSTER > 1 ? ALL_FRAGMENTS : 0;
  float4* sums;
  DEV float* squares() const { return (float*)(sums + ALL_FRAGMENTS * WARPS_K * 32); }
  DEV float4* received(int turn) const { return (float4*)(squares() + SHARES * COLUMNS) + (turn & 1) * RECEIVED * 32; }
  DEV float* received_squares() const { return (float*)(received(0) + 2 * RECEIVED * 32); }
  DEV u32 barrier(int turn) const { return shared_address(received_squares() + CLUSTER * COLUMNS) + (turn & 1) * 8; }

  DEV void initialise() const {
    if (threadIdx.x == 0) mbarrier_init(barrier(0), 1), mbarrier_init(barrier(1), 1), mbarrier_init_fence();
  }
  // The first `fragments` of a tile, the block's `turn`-th, to the blocks that they are dealt to; then waits for
  // those of the other blocks.
  DEV void swap(int turn, int fragments, int rank, int warp, int lane) const {
    if (threadIdx.x == 0) {
      const int squares_bytes = NORMED && turn == 0 ? CLUSTER * COLUMNS * 4 : 0;
      mbarrier_arrive_expect(barrier(turn), fragments * 32 * 16 + squares_bytes);
    }
    if (NORMED && turn == 0 && warp == WARPS - 1 && lane < COLUMNS / 4) {
      const float4 four = add_up<SHARES>((const float4*)squares() + lane, COLUMNS / 4);
#pragma unroll
      for (int r = 0; r < CLUSTER; r++)
        send_float4(shared_address(received_squares() + rank * COLUMNS + lane * 4), four, barrier(turn), r);
    }
#pragma unroll 1
    for (int f = warp; f < fragments; f += WARPS) {
      const float4 total = add_up<WARPS_K>(sums + f * WARPS_K * 32 + lane, 32);
      const int place = f - f % CLUSTER + rank;
      send_float4(shared_address(received(turn) + place * 32 + lane), total, barrier(turn), f % CLUSTER);
    }
    mbarrier_wait(barrier(turn), turn >> 1 & 1);
  }
};

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1) narrow_gemm(
    result_t* out,                // [m, n], GATED: [m, n / 2]; rows at multiples of two results; may be `residual`
    const scalar_t* x, const scalar_t* __restrict__ w,
    const scalar_t* __restrict__ bias,  // [n], at a multiple of 4 bytes, or null
    const scalar_t* residual,     // as out, or null
    int m, int n, int k, int x_stride, int out_stride, int residual_stride,
    int tile_rows,                // even, at most TILE_ROWS; GATED: a multiple of 16, as is n
    float eps)                    // NORMED
{
  extern __shared__ __align__(128) u8 smem[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
  const int rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, num_clusters = gridDim.x / CLUSTER;
  const int num_chunks = (k + CHUNK - 1) / CHUNK;
  const int first_chunk = rank * num_chunks / CLUSTER, last_chunk = (rank + 1) * num_chunks / CLUSTER - 1;
  const int my_chunks = last_chunk - first_chunk + 1;  // of each tile
  const int num_tiles = (n + tile_rows - 1) / tile_rows, my_tiles = (num_tiles - cluster + num_clusters - 1) / num_clusters;
  const int loads = my_tiles * my_chunks;
  const Operands op{x, w, m, n, k, x_stride, tile_rows};
  const Epilogue epilogue{out, bias, residual, m, out_stride, residual_stride};
  const smem_t ring = smem_address(smem);
  const Exchange exchange{(float4*)(smem + STAGES * STAGE)};

  // Fill all stages but one.
  const bool loads_weights = threadIdx.x < LOADERS;
  const int loader = threadIdx.x % LOADERS;
  Cursor next{cluster, first_chunk};
  if (!loads_weights) grid_dependency_wait();  // x is read from here on
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < loads) {
      if (loads_weights) load_weights(op, ring + s * STAGE, next, loader);
      else load_inputs(op, ring + s * STAGE, next.chunk, loader);
      next.advance(first_chunk, last_chunk, num_clusters);
    }
    copy_async_commit();
  }
  if (loads_weights) grid_dependency_wait();
  grid_dependency_launch();
  if (CLUSTER > 1) {
    exchange.initialise();
    cluster_meet();  // nothing is sent to a block before its barriers exist
  }

  const int dealt = rank + CLUSTER * warp, column = dealt % COLUMN_TILES * 8 + (lane & 3) * 2;  // of this lane's results
  int done = 0, stage = 0;  // chunks multiplied so far, and where the next one lies
  float2 factors = make_float2(1.f, 1.f);
#pragma unroll 1
  for (int tile = cluster, turn = 0; tile < num_tiles; tile += num_clusters, turn++) {
    const int first = tile * tile_rows, count = min(tile_rows, n - first);
    Sums sums = {};
    Squares squares = {};
#pragma unroll 1
    for (int i = 0; i < my_chunks; i++, done++) {
      copy_async_wait<STAGES - 2>();
      __syncthreads();  // all copies of this stage are there, and nobody reads the one before any more
      if (done + STAGES - 1 < loads) {
        const smem_t free_stage = ring + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE;
        if (loads_weights) load_weights(op, free_stage, next, loader);
        else load_inputs(op, free_stage, next.chunk, loader);
        next.advance(first_chunk, last_chunk, num_clusters);
      }
      copy_async_commit();
      if (warp_n * WARP_ROWS < count) multiply(ring + stage * STAGE, warp_n, warp_k, lane, sums);
      if (NORMED && turn == 0) multiply_inputs(ring + stage * STAGE, warp, lane, squares);
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }

    Share shares[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      shares[i] = load_share(epilogue, first + (dealt / COLUMN_TILES + i * ROW_STEP) * 16, first + count, column, lane);

    // The barrier of a chunk lies between the last tile's reads of the exchange and these writes.
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
      exchange.sums[((warp_n * FRAGMENTS + f) * WARPS_K + warp_k) * 32 + lane] =
          make_float4(sums[f][0], sums[f][1], sums[f][2], sums[f][3]);
    if (NORMED && turn == 0) store_squares(squares, exchange.squares(), warp, lane);
    __syncthreads();
    const int fragments = (count + 15) / 16 * COLUMN_TILES;
    if (CLUSTER > 1) exchange.swap(turn, fragments, rank, warp, lane);
    if (NORMED && turn == 0)
      factors = CLUSTER > 1 ? norm_factors<CLUSTER>(exchange.received_squares(), column, k, eps)
                            : norm_factors<SHARES>(exchange.squares(), column, k, eps);
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const int f = dealt + i * DEALT;
      if (f >= fragments) break;
      const float4 y = CLUSTER > 1 ? add_up<CLUSTER>(exchange.received(turn) + (f - rank) * 32 + lane, 32)
                                   : add_up<WARPS_K>(exchange.sums + f * WARPS_K * 32 + lane, 32);
      store_share(epilogue, shares[i], y, factors, lane);
    }
  }
}
