// y = x W^T for up to 128 rows x, bound by reading W: see engine/ops/narrow_gemm.py.
//
// What limits more rows than a handful is how often x is read, once for each tile of rows of W: tiles
// should be high. But then there are fewer of them than SMs. So a tile is given to a cluster of CLUSTER
// blocks, each of which takes a part of K; at its end they add their sums through each other's shared
// memory, in order of the blocks:
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
// lane 4 g + t are of neighbours: rows 2 g and 2 g + 1 of W with rows 2 t and 2 t + 1 of x.
//
//   -DSCALAR_BF16=1 | -DSCALAR_FP16=1
//   -DROW_TILES=n -DWARPS_N=n -DWARPS_K=n   tiles of up to 16 ROW_TILES WARPS_N rows of W; 8 warps in all
//   -DCOLUMN_TILES=n                        up to 8 n rows of x; n is even
//   -DCHUNK=64 | 128                        columns, a multiple of 16 WARPS_K
//   -DSTAGES=n -DCLUSTER=n
#include "common/dtype.cuh"
#include "common/async_copy.cuh"
#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
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
constexpr int SLOTS = WARPS_K > 2 ? WARPS_K - 1 : 1;       // of a fragment in the exchange
constexpr int ROWS_AT_ONCE = LOADERS / PIECES;             // that the copying threads cover
static_assert(WARPS == 8 && COLUMN_TILES % 2 == 0 && CHUNK % (16 * WARPS_K) == 0, "see above");
static_assert(TILE_ROWS % ROWS_AT_ONCE == 0 && COLUMNS % ROWS_AT_ONCE == 0, "copies come out even");

DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef SCALAR_FP16
  mma_fp16(c, a, b0, b1);
#else
  mma_bf16(c, a, b0, b1);
#endif
}
DEV float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

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
// number of the row of x, and of the pair of rows of W, as A takes every other row.
DEV void load_weights(const Operands& op, smem_t stage, Cursor at, int loader) {
  const int row = loader / PIECES, piece = loader % PIECES, column = at.chunk * CHUNK + piece * 8;
  const bool valid = column < op.k;
  const int first = at.tile * op.tile_rows, count = min(op.tile_rows, op.n - first);
  const scalar_t* from = op.w + (i64)(first + row) * op.k + (valid ? column : 0);
#pragma unroll
  for (int i = 0; i < TILE_ROWS / ROWS_AT_ONCE; i++) {
    const int r = i * ROWS_AT_ONCE + row;
    if (r < count)
      copy_async_16(stage + r * ROW_BYTES + ((piece ^ (r >> 1 & 7)) << 4), from + (i64)i * ROWS_AT_ONCE * op.k, valid);
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

// One chunk. Row j of ldmatrix's matrix q is at the address of lane 8 q + j. A: the even rows' first 8
// columns, the odd rows', then the last 8 columns of both. B: columns 0 to 7 and 8 to 15 of 8 rows of x,
// then of the next 8.
DEV void multiply(smem_t stage, int warp_n, int warp_k, int lane, Sums& sums) {
  const int q = lane >> 3, j = lane & 7;
  const smem_t w_row = stage + (warp_n * WARP_ROWS + 2 * j + (q & 1)) * ROW_BYTES;
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

// Adds what the warps have that share rows, and leaves fragment f's total in its slot 0. `exchange`:
// [WARPS_N][FRAGMENTS][SLOTS][32 lanes], here from the warp's first row and the lane on. Warp f % WARPS_K of
// those is the fragment's owner: only it reads the others' sums, so it may write the total over them.
DEV void add_over_warps(const Sums& sums, float4* exchange, int warp_k) {
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    const int owner = f % WARPS_K, rank = warp_k - (warp_k > owner);  // among those that are not the owner
    if (warp_k != owner)
      exchange[(f * SLOTS + rank) * 32] = make_float4(sums[f][0], sums[f][1], sums[f][2], sums[f][3]);
  }
  if (WARPS_K > 1) __syncthreads();
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    if (warp_k != f % WARPS_K) continue;
    // in order of the warps, whoever owns the fragment: a row's sums do not depend on its place
    const int owner = f % WARPS_K;
    const float4 own = make_float4(sums[f][0], sums[f][1], sums[f][2], sums[f][3]);
    float4 total = owner == 0 ? own : exchange[f * SLOTS * 32];
#pragma unroll
    for (int w = 1; w < WARPS_K; w++)
      total = plus(total, w == owner ? own : exchange[(f * SLOTS + w - (w > owner)) * 32]);
    exchange[f * SLOTS * 32] = total;
  }
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1) narrow_gemm(
    scalar_t* __restrict__ out,   // [m, n], rows at multiples of 4 bytes
    const scalar_t* __restrict__ x, const scalar_t* __restrict__ w,
    const scalar_t* __restrict__ bias,  // [n], at a multiple of 4 bytes, or null
    int m, int n, int k, int x_stride, int out_stride,
    int tile_rows)                // even, at most TILE_ROWS
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
  const smem_t ring = smem_address(smem);
  float4* exchange = (float4*)(smem + STAGES * STAGE);

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

  int done = 0, stage = 0;  // chunks multiplied so far, and where the next one lies
  for (int tile = cluster; tile < num_tiles; tile += num_clusters) {
    const int first = tile * tile_rows, count = min(tile_rows, n - first);
    Sums sums = {};
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
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    add_over_warps(sums, exchange + warp_n * FRAGMENTS * SLOTS * 32 + lane, warp_k);
    cluster_sync();

    // The tile's fragments are dealt out to the warps of the cluster's blocks.
#pragma unroll 2
    for (int f = rank + CLUSTER * warp; f < WARPS_N * FRAGMENTS; f += CLUSTER * WARPS) {
      const int row = f / COLUMN_TILES * 16 + (lane >> 2) * 2, column = f % COLUMN_TILES * 8 + (lane & 3) * 2;
      if (row >= count || column >= m) continue;
      const u32 biases = bias ? *(const u32*)(bias + first + row) : 0;
      const smem_t from = smem_address(exchange + f * SLOTS * 32 + lane);
      float4 part[CLUSTER], y = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int r = 0; r < CLUSTER; r++) part[r] = load_float4_of_block(from, r);
#pragma unroll
      for (int r = 0; r < CLUSTER; r++) y = plus(y, part[r]);
      float b0, b1;
      unpack2(biases, b0, b1);
      scalar_t* to = out + (i64)column * out_stride + first + row;
      *(u32*)to = pack2(y.x + b0, y.z + b1);
      if (column + 1 < m) *(u32*)(to + out_stride) = pack2(y.y + b0, y.w + b1);
    }
    cluster_sync();  // the exchange may be written again, and blocks may end
  }
}
