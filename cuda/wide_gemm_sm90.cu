// y = x W^T for up to 256 rows x, bound by reading W, for Hopper: see engine/ops/wide_gemm_sm90.py.
//
// One thread fetches chunks of 64 columns of W and x through a ring of STAGES stages (TMA); 1 to 3 warpgroups
// multiply them, rows of W as M and rows of x as N of wgmma, which thus has no idle rows:
//
//   shared memory    W [TILE_ROWS, 64]  x [COLUMNS, 64]    STAGES times, each 128-byte swizzled
//   warpgroup c      sums [64 HEIGHTS, COLUMNS] of rows 64 HEIGHTS c ... of the tile, in registers
//
// The blocks of a cluster take neighbouring tiles and the same chunks, so that x comes out of L2 once for
// all of them: each block fetches its share of x's rows into the shared memory of all (multicast). A stage
// is therefore free when the consumers of all blocks have read it, and full when the bytes are there that
// all of them sent.
//
// Work is dealt out by units: all chunks of the clusters' first tiles, then of the next ones ... Every cluster
// takes as many units as the others, whether that ends a tile or not (stream-K, https://arxiv.org/abs/2301.03598):
//
//   tile       |     0     |     1     |     2     |
//   cluster    |   0   |   1   |   2   |   3   | ...      tile 1 is clusters 1's and 2's
//
// Sums of a part of a tile go to memory. Whichever warp comes last to its 16 rows adds the parts, in order of
// the clusters and not of their arrival, so that the same call gives the same bits.
//
//   -DSCALAR_BF16=1 | -DSCALAR_FP16=1
//   -DCOLUMNS=32|64|96|128|192|256   up to so many rows of x
//   -DCONSUMERS=n -DHEIGHTS=n        warpgroups, and 64 rows of W for each, so many times
//   -DSTAGES=n -DCLUSTER=1|2|4
#include "common/dtype.cuh"
#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma.cuh"
#include "common/sm90.cuh"

constexpr int CHUNK = 64;                              // columns of a unit
constexpr int TILE_ROWS = 64 * HEIGHTS * CONSUMERS;    // of W, for a block
constexpr int W_BYTES = TILE_ROWS * 128;
constexpr int X_SHARE = COLUMNS / CLUSTER;             // rows of x that a block fetches
constexpr int STAGE = W_BYTES + COLUMNS * 128;
constexpr int THREADS = 128 * (1 + CONSUMERS);
constexpr int EIGHTS = COLUMNS / 8;                    // of 8 columns of sums; a lane has 4 numbers of each
constexpr int AT_ONCE = EIGHTS % 8 == 0 && COLUMNS * HEIGHTS <= 192 ? 8 : 4;  // of them, in adding up parts
// Only where sums are many do registers go from the fetching warps to the others: what the others do not
// take is left for blocks of the next kernel.
constexpr bool MOVES_REGISTERS = CONSUMERS > 1 && COLUMNS * HEIGHTS > 128;
static_assert(X_SHARE % 8 == 0, "shares start where the swizzle does");
static_assert(COLUMNS % 32 == 0 && COLUMNS * HEIGHTS <= (CONSUMERS > 2 ? 96 : 256), "the sums are in registers");

typedef float Sums[HEIGHTS][COLUMNS / 2];  // by 64 rows of W; see wgmma in common/sm90.cuh

// Stages in shared memory and two barriers for each. Stages start at multiples of 1024 bytes.
struct Ring {
  u32 stages, barriers;
  DEV explicit Ring(const void* raw) {
    stages = (shared_address(raw) + 1023) & ~1023u;
    barriers = stages + STAGES * STAGE;
  }
  DEV u32 w(u32 stage) const { return stages + stage * STAGE; }
  DEV u32 x(u32 stage) const { return stages + stage * STAGE + W_BYTES; }
  DEV u32 full(u32 stage) const { return barriers + 8 * stage; }
  DEV u32 empty(u32 stage) const { return barriers + 8 * (STAGES + stage); }
};

// Where in the ring, and which parity the full barrier has when this round's bytes are there.
struct Place {
  u32 stage = 0, parity = 0;
  DEV void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// Units, and who takes them. A grain of `grain` units is never divided; it divides a tile.
struct Work {
  int num_chunks, grain, num_grains, num_clusters;
  DEV int first_unit(int cluster) const { return cluster * num_grains / num_clusters * grain; }
  DEV int cluster_of(int unit) const { return ((unit / grain + 1) * num_clusters - 1) / num_grains; }
};

struct Params {
  scalar_t* out;         // [m, n]
  const scalar_t* bias;  // [n] or null
  float4* parts;         // [clusters, 2, CLUSTER, CONSUMERS, HEIGHTS, EIGHTS, 128 threads]
  u32* arrivals;         // [tiles, CLUSTER, CONSUMERS, 4 warps], zeros
  int m, n, out_stride, tile_rows;
  Work work;
};

// A unit and its place.
struct Cursor {
  int tile, chunk, num_chunks;
  Place place;
  DEV Cursor(int unit, int num_chunks) : tile(unit / num_chunks), chunk(unit % num_chunks), num_chunks(num_chunks) {}
  DEV void advance() {
    if (++chunk == num_chunks) chunk = 0, tile++;
    place.advance();
  }
};

// One thread.
struct Producer {
  const Params& p;
  const Ring& ring;
  const TensorMap *w_map, *x_map;
  int rank, num_units, ahead;  // the first `ahead` units find their stages empty
  Cursor w, x;                 // what is fetched next

  DEV Producer(const Params& p, const Ring& ring, const TensorMap* w_map, const TensorMap* x_map, int first, int last, int rank)
      : p(p), ring(ring), w_map(w_map), x_map(x_map), rank(rank), num_units(last - first), ahead(min(last - first, STAGES)),
        w(first, p.work.num_chunks), x(w) {}
  DEV void load_w() {
    const u32 barrier = ring.full(w.place.stage);
    mbarrier_arrive_expect(barrier, (p.tile_rows + COLUMNS) * 128);
    tma_load_2d(ring.w(w.place.stage), w_map, barrier, w.chunk * CHUNK, (w.tile * CLUSTER + rank) * p.tile_rows);
    w.advance();
  }
  DEV void load_x() {
    const u32 barrier = ring.full(x.place.stage), to = ring.x(x.place.stage) + rank * X_SHARE * 128;
    if (CLUSTER > 1) tma_load_2d_to((1 << CLUSTER) - 1, to, x_map, barrier, x.chunk * CHUNK, rank * X_SHARE);
    else tma_load_2d(to, x_map, barrier, x.chunk * CHUNK, 0);
    x.advance();
  }
  // Before the kernel in front of this one has ended: it never writes W.
  DEV void start() {
    for (int i = 0; i < ahead; i++) load_w();
    tensor_map_prefetch(x_map);
  }
  DEV void run() {
    for (int i = 0; i < ahead; i++) load_x();
    for (int i = ahead; i < num_units; i++) {
      mbarrier_wait(ring.empty(w.place.stage), w.place.parity ^ 1);
      load_w();
      load_x();
    }
  }
};

// From L2: other blocks have just written it.
DEV float4 load_float4_l2(const float4* p) {
#ifdef SLUICE_EMULATE
  return *p;
#else
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
#endif
}

// A release before an atomic, an acquire behind one. (__threadfence() orders more, and takes longer.)
DEV void fence_gpu() {
#ifndef SLUICE_EMULATE
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// Where a cluster leaves a part of a tile, for this thread: in its second place if it has the tile's beginning.
DEV float4* part_of(const Params& p, int cluster, int tile, int rank, int thread) {
  const int place = 2 * cluster + (p.work.first_unit(cluster) <= tile * p.work.num_chunks);
  return p.parts + (i64)(place * CLUSTER + rank) * (CONSUMERS * HEIGHTS * EIGHTS * 128) +
         (thread >> 7) * (HEIGHTS * EIGHTS * 128) + (thread & 127);
}

// One warp has a part of its rows' sums. True if it was the last to come; then it has all.
DEV bool add_parts(const Params& p, int cluster, int tile, int rank, Sums& sums) {
  const int thread = threadIdx.x, lane = thread & 31, row = (thread >> 7) * HEIGHTS * 64 + (thread >> 5 & 3) * 16;
  if (row >= min(p.tile_rows, p.n - (tile * CLUSTER + rank) * p.tile_rows)) return false;  // beyond the tile or W
  const int first = p.work.cluster_of(tile * p.work.num_chunks);
  const int num_parts = p.work.cluster_of((tile + 1) * p.work.num_chunks - 1) - first + 1;
  float4* mine = part_of(p, cluster, tile, rank, thread);
#pragma unroll
  for (int h = 0; h < HEIGHTS; h++)
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
      const float* d = sums[h] + 4 * i;
      mine[(h * EIGHTS + i) * 128] = make_float4(d[0], d[1], d[2], d[3]);
    }
  __syncwarp();
  fence_gpu();
  u32 before = 0;
  if (lane == 0)  // back to zero for the next launch
    before = atomicInc(p.arrivals + (tile * CLUSTER + rank) * (CONSUMERS * 4) + (thread >> 5), num_parts - 1);
  if (__shfl_sync(~0u, before, 0) != (u32)num_parts - 1) return false;

  fence_gpu();
  __syncwarp();
#pragma unroll
  for (int h = 0; h < HEIGHTS; h++)
#pragma unroll
    for (int i = 0; i < EIGHTS; i += AT_ONCE) {
      float* d = sums[h] + 4 * i;
      float total[4 * AT_ONCE] = {};
      for (int part = first; part < first + num_parts; part++) {
        if (part == cluster) {
#pragma unroll
          for (int e = 0; e < 4 * AT_ONCE; e++) total[e] += d[e];
          continue;
        }
        const float4* from = part_of(p, part, tile, rank, thread) + (h * EIGHTS + i) * 128;
        float4 other[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) other[j] = load_float4_l2(from + j * 128);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
          total[4 * j] += other[j].x, total[4 * j + 1] += other[j].y;
          total[4 * j + 2] += other[j].z, total[4 * j + 3] += other[j].w;
        }
      }
#pragma unroll
      for (int e = 0; e < 4 * AT_ONCE; e++) d[e] = total[e];
    }
  return true;
}

// Sums of a tile whose first row of W is `first_row`. A lane ends up with 8 rows of W in a row of x.
DEV void write(const Params& p, int first_row, const Sums& sums) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int count = min(p.tile_rows, p.n - first_row);  // a multiple of 8
#pragma unroll
  for (int h = 0; h < HEIGHTS; h++) {
    const int row = ((threadIdx.x >> 7) * HEIGHTS + h) * 64 + (threadIdx.x >> 5 & 3) * 16;  // of the warp, in the tile
    const bool has_upper = row < count, has_lower = row + 8 < count;
    const scalar_t* bias = p.bias + first_row + row + g;
    const float bias0 = p.bias && has_upper ? to_float(bias[0]) : 0.f;
    const float bias1 = p.bias && has_lower ? to_float(bias[8]) : 0.f;
#pragma unroll
    for (int n = 0; n < EIGHTS; n += 4) {
      u32 upper[4], lower[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* d = sums[h] + 4 * (n + i);
        upper[i] = transpose_8x8(pack2(d[0] + bias0, d[1] + bias0));
        lower[i] = transpose_8x8(pack2(d[2] + bias1, d[3] + bias1));
      }
      transpose_quad(upper, t);
      transpose_quad(lower, t);
      const int x_row = (n + t) * 8 + g;
      if (x_row >= p.m) continue;
      scalar_t* to = p.out + (i64)x_row * p.out_stride + first_row + row;
      if (has_upper) *(uint4*)to = make_uint4(upper[0], upper[1], upper[2], upper[3]);
      if (has_lower) *(uint4*)(to + 8) = make_uint4(lower[0], lower[1], lower[2], lower[3]);
    }
  }
}

// One warpgroup.
DEV void consume(const Params& p, const Ring& ring, int cluster, int first_unit, int last, int rank) {
  const int lane = threadIdx.x & 31, num_chunks = p.work.num_chunks;
  const u32 w_offset = (threadIdx.x >> 7) * HEIGHTS * 64 * 128;
  auto release = [&](u32 stage) {
    if (CLUSTER > 1 && lane < CLUSTER) mbarrier_arrive_at(ring.empty(stage), lane);
    if (CLUSTER == 1 && lane == 0) mbarrier_arrive(ring.empty(stage));
  };
  Place place;
  for (int unit = first_unit; unit < last;) {
    const int first = unit, tile = unit / num_chunks, end = min(last, (tile + 1) * num_chunks);
    Sums sums;
    u32 before = 0;  // the stage of the chunk before
    for (; unit < end; unit++) {
      mbarrier_wait(ring.full(place.stage), place.parity);
      const u32 w = ring.w(place.stage) + w_offset, x = ring.x(place.stage);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < CHUNK / 16; k++)
#pragma unroll
        for (int h = 0; h < HEIGHTS; h++)
          wgmma_ss(sums[h], descriptor_k_major(w + h * 64 * 128 + k * 32), descriptor_k_major(x + k * 32), unit > first || k > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (unit > first) release(before);
      before = place.stage;
      place.advance();
    }
    wgmma_wait<0>();
    release(before);
#pragma unroll
    for (int h = 0; h < HEIGHTS; h++) wgmma_results(sums[h]);
    if (end - first == num_chunks || add_parts(p, cluster, tile, rank, sums))
      write(p, (tile * CLUSTER + rank) * p.tile_rows, sums);
  }
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1) wide_gemm_sm90(
    const __grid_constant__ TensorMap w_map,  // [n, k], box [tile_rows, CHUNK]
    const __grid_constant__ TensorMap x_map,  // [m, k], box [X_SHARE, CHUNK]
    scalar_t* out,                            // [m, n], rows at multiples of 16 bytes
    const scalar_t* __restrict__ bias,        // [n] or null
    float4* parts, u32* arrivals,             // see Params; not used if no tile is divided
    int m, int n, int out_stride, int num_chunks,
    int tile_rows,                            // of a block; a multiple of 8, at most TILE_ROWS
    int num_tiles,                            // of a cluster
    int grain)                                // chunks that are not divided: 1 or num_chunks
{
  extern __shared__ u8 raw[];
  const Ring ring(raw);
  const int rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER;
  const Work work{num_chunks, grain, num_tiles * (num_chunks / grain), (int)gridDim.x / CLUSTER};
  const Params params{out, bias, parts, arrivals, m, n, out_stride, tile_rows, work};
  const int first = work.first_unit(cluster), last = work.first_unit(cluster + 1);
  Producer producer(params, ring, &w_map, &x_map, first, last, rank);
  const bool produces = threadIdx.x == 128 * CONSUMERS;
  if (produces) {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(ring.full(i), 1);
      mbarrier_init(ring.empty(i), 4 * CONSUMERS * CLUSTER);  // one arrival per consumer warp
    }
    mbarrier_init_fence();
    fence_async_proxy();
    producer.start();
  }
  cluster_meet();         // nothing is sent to a block before its barriers exist
  grid_dependency_wait(); // x is read and out and the parts are written from here on
  grid_dependency_launch();
  if (threadIdx.x >= 128 * CONSUMERS) {
    if (MOVES_REGISTERS) registers_give<40>();
    if (produces) producer.run();
    cluster_meet();       // no block ends while others send to it
  } else {
    if (MOVES_REGISTERS) registers_take<232>();
    consume(params, ring, cluster, first, last, rank);
    cluster_meet();
  }
}
