// out = silu(x G^T) * (x U^T) for many rows x, for Hopper: gate and up never reach memory. W has the rows of G
// and U interleaved by eights (engine/ops/fused_product.py); how a product is cut up: engine/ops/gated_gemm_sm90.py.
//
// Blocks are persistent, one on an SM. A tile is ROWS rows of x by TILE rows of W; one thread fetches chunks of
// 64 columns of both through a ring of STAGES stages (TMA), on from tile to tile, and warpgroups multiply them
// (wgmma; rows of x are M, rows of W are N):
//
//   shared memory    x [ROWS, 64]  W [TILE, 64]     STAGES times, each 128-byte swizzled
//   warpgroup        sums [64 HEIGHTS, TILE] in registers, of which it stores outputs [64 HEIGHTS, TILE / 2]
//
//   PING_PONG=0   All warpgroups have a part of the same tile, ROWS = 64 HEIGHTS GROUPS. They read W's stages
//                 together, so more is computed for a byte that is fetched.
//   PING_PONG=1   Each warpgroup has a tile of its own, ROWS = 64 HEIGHTS, and they take turns: one multiplies while
//                 the other stores what it has.
//
//       group 0   tile 0, products | outputs           | tile 2, products | outputs
//       group 1   (its turn comes) | tile 1, products  | outputs          | tile 3 ...
//
//   CLUSTER=2     Two blocks take tiles that differ in rows of x only. Each fetches half of the chunk of W, for both.
//
// Rows of x and W that do not exist, and columns beyond the last, arrive as zeros.
//
//   -DSCALAR_BF16=1 | -DSCALAR_FP16=1
//   -DGROUPS=n -DHEIGHTS=n   warpgroups that multiply, and how often 64 rows of x each has
//   -DTILE=n                 rows of W: a multiple of 64, and a size of N in common/sm90.cuh
//   -DSTAGES=n -DCLUSTER=1|2 -DPING_PONG=0|1
#include "common/dtype.cuh"
#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma.cuh"
#include "common/multicast.cuh"
#include "common/sm90.cuh"
#include "common/vec.cuh"

constexpr int CHUNK = 64;  // columns
constexpr int GROUP_ROWS = 64 * HEIGHTS;
constexpr int ROWS = PING_PONG ? GROUP_ROWS : GROUPS * GROUP_ROWS;
constexpr int X_BYTES = ROWS * 128, W_BYTES = TILE * 128, STAGE = X_BYTES + W_BYTES;
constexpr int W_SHARE = TILE / CLUSTER;                   // rows that a block fetches
constexpr int READERS = 4 * (PING_PONG ? 1 : GROUPS);     // warps of a block that read a stage
constexpr int QUARTETS = TILE / 64;                       // 32 outputs each, of a row
static_assert(TILE % 64 == 0, "the lanes of a quad store one octet of outputs each");
static_assert(ROWS <= 256 && W_SHARE <= 256, "boxes of a tensor map");

// Of a thread, while it computes and while it fetches: 64 KB of registers for all warpgroups.
constexpr int REGISTERS = GROUPS == 3 ? 160 : HEIGHTS * TILE > 320 ? 240 : 232;
constexpr int REGISTERS_TO_FETCH = GROUPS == 3 ? 32 : HEIGHTS * TILE > 320 ? 24 : 40;

typedef float Sums[HEIGHTS][TILE / 2];  // by 64 rows of x; see wgmma in common/sm90.cuh

// Stages in shared memory and two barriers for each. Stages start at multiples of 1024 bytes.
struct Ring {
  u32 stages, barriers;
  DEV explicit Ring(const void* raw) {
    stages = (shared_address(raw) + 1023) & ~1023u;
    barriers = stages + STAGES * STAGE;
  }
  DEV u32 x(u32 stage) const { return stages + stage * STAGE; }
  DEV u32 w(u32 stage) const { return stages + stage * STAGE + X_BYTES; }
  // "full": a stage's bytes are there; "empty": every warp that reads it is done, in all blocks of the cluster.
  DEV u32 full(u32 stage) const { return barriers + 8 * stage; }
  DEV u32 empty(u32 stage) const { return barriers + 8 * (STAGES + stage); }
};

// Where in the ring, and which parity the full barrier has when this round's bytes are there.
struct Place {
  u32 stage, parity;
  DEV explicit Place(u32 unit) : stage(unit % STAGES), parity(unit / STAGES & 1) {}  // chunks since the kernel began
  DEV void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

struct Tile {
  int row, w_row;  // the first, of x and of W
};

// Tiles of a cluster, those of its blocks one below the other. All clusters go through bands of `band` such pairs
// down x, in each from column to column: so what runs at a time reads few rows of either matrix.
struct Tiles {
  int first, step, count, heights, columns, band;
  DEV Tiles(int m, int n, int band) : band(band) {
    first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    heights = (m + CLUSTER * ROWS - 1) / (CLUSTER * ROWS), columns = (n + TILE - 1) / TILE;
    count = (heights * columns - first + step - 1) / step;
  }
  DEV Tile at(int number) const {
    const int item = first + number * step, in_band = item % (band * columns);
    const int top = item / (band * columns) * band, here = max(1, min(band, heights - top));  // 1: behind the last
    const int height = top + in_band % here, column = in_band / here;
    return {(height * CLUSTER + (int)blockIdx.x % CLUSTER) * ROWS, column * TILE};
  }
};

// --- loading: one thread ---

// A chunk of a tile, and its place.
struct Cursor {
  const Tiles& tiles;
  int num_chunks, number = 0, chunk = 0;
  Tile tile;
  Place place;
  DEV Cursor(const Tiles& tiles, int num_chunks) : tiles(tiles), num_chunks(num_chunks), tile(tiles.at(0)), place(0) {}
  DEV void advance() {
    if (++chunk == num_chunks) chunk = 0, tile = tiles.at(++number);
    place.advance();
  }
};

DEV void load_w(const Ring& ring, const TensorMap* map, const Cursor& at) {
  const u32 barrier = ring.full(at.place.stage), to = ring.w(at.place.stage);
  mbarrier_arrive_expect(barrier, STAGE);
  if (CLUSTER == 1) {
    tma_load_2d(to, map, barrier, at.chunk * CHUNK, at.tile.w_row);
  } else {
    const int share = blockIdx.x % CLUSTER * W_SHARE;
    tma_multicast_2d<CLUSTER>(to + share * 128, map, barrier, at.chunk * CHUNK, at.tile.w_row + share);
  }
}
DEV void load_x(const Ring& ring, const TensorMap* map, const Cursor& at) {
  tma_load_2d(ring.x(at.place.stage), map, ring.full(at.place.stage), at.chunk * CHUNK, at.tile.row);
}

DEV void produce(const Ring& ring, const Tiles& tiles, int num_chunks, const TensorMap* w_map, const TensorMap* x_map) {
  const int num_units = tiles.count * num_chunks, ahead = min(num_units, STAGES);
  Cursor next(tiles, num_chunks);
  for (Cursor w = next; w.number * num_chunks + w.chunk < ahead; w.advance()) load_w(ring, w_map, w);
  tensor_map_prefetch(x_map);
  grid_dependency_wait();  // x may be the result of the kernel before this one, W is not
  int unit = 0;
  for (; unit < ahead; unit++, next.advance()) load_x(ring, x_map, next);
  for (; unit < num_units; unit++, next.advance()) {
    mbarrier_wait(ring.empty(next.place.stage), next.place.parity ^ 1);
    load_w(ring, w_map, next);
    load_x(ring, x_map, next);
  }
}

// --- results ---

DEV float gated(float gate, float up) {
  constexpr float LOG2_E = 1.4426950408889634f;
  return gate * reciprocal_fast(1.f + exp2_fast(-LOG2_E * gate)) * up;
}

// Of 64 rows, by a warpgroup. A lane has sums of rows g and g + 8, columns 2 t and 2 t + 1 of all octets: gate,
// up, gate, ... Of four octets of outputs it stores the t-th.
DEV void write(const float (&sums)[TILE / 2], scalar_t* out, i64 out_stride, int m, int num_outputs, int row, int column) {
  const int warp = threadIdx.x >> 5 & 3, g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
  row += warp * 16 + g, column += 8 * t;
  scalar_t* to = out + row * out_stride + column;
#pragma unroll
  for (int i = 0; i < QUARTETS; i++) {
#pragma unroll
    for (int lower = 0; lower < 2; lower++) {
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float *gate = sums + 8 * (4 * i + j) + 2 * lower, *up = gate + 4;
        words[j] = pack2(gated(gate[0], up[0]), gated(gate[1], up[1]));
      }
      transpose_quad(words, t);
      if (row + 8 * lower < m && column + 32 * i < num_outputs)
        store16(to + 8 * lower * out_stride + 32 * i, make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

// --- products: one warpgroup ---

DEV void consume(const Ring& ring, const Tiles& tiles, int num_chunks, int group, scalar_t* out, i64 out_stride, int m, int num_outputs) {
  const int lane = threadIdx.x & 31;
  const u32 x_offset = PING_PONG ? 0 : group * GROUP_ROWS * 128;
  auto take_turn = [&] { if (PING_PONG) named_barrier_sync(1 + group, 256); };
  auto pass_turn = [&] { if (PING_PONG) named_barrier_arrive(1 + (group + 1) % GROUPS, 256); };
  auto release = [&](u32 stage) {
    if (CLUSTER == 1) {
      if (lane == 0) mbarrier_arrive(ring.empty(stage));
    } else {
      if (lane < CLUSTER) mbarrier_arrive_at(ring.empty(stage), lane);
    }
  };
  if (group == GROUPS - 1) pass_turn();  // group 0 begins
  Place place(0);
  for (int number = PING_PONG ? group : 0; number < tiles.count; number += PING_PONG ? GROUPS : 1) {
    Sums sums;
    u32 before = 0;  // the stage of the chunk before
    if (PING_PONG) place = Place(number * num_chunks);
    take_turn();  // not to mistake an earlier round's parity for this one's, too: every chunk before has arrived
    for (int chunk = 0; chunk < num_chunks; chunk++) {
      mbarrier_wait(ring.full(place.stage), place.parity);
      const u32 x = ring.x(place.stage) + x_offset, w = ring.w(place.stage);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < CHUNK / 16; k++)
#pragma unroll
        for (int h = 0; h < HEIGHTS; h++)
          wgmma_ss(sums[h], descriptor_k_major(x + h * 64 * 128 + k * 32), descriptor_k_major(w + k * 32), chunk > 0 || k > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (chunk > 0) release(before);
      before = place.stage;
      place.advance();
    }
    pass_turn();
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < HEIGHTS; h++) wgmma_results(sums[h]);
    release(before);
    // Never so. The assembler moves the release down through straight-line code, behind the gates; with more sums
    // than these it lacks the registers to keep it here.
    if (HEIGHTS * TILE <= 256 && m < 0) __trap();
    const Tile tile = tiles.at(number);
#pragma unroll
    for (int h = 0; h < HEIGHTS; h++)
      write(sums[h], out, out_stride, m, num_outputs, tile.row + (PING_PONG ? 0 : group * GROUP_ROWS) + h * 64, tile.w_row / 2);
  }
  if (group == tiles.count % GROUPS) take_turn();  // the last one passed, so that no barrier stays half full
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(128 * (GROUPS + 1), 1) gated_gemm_sm90(
    const __grid_constant__ TensorMap w_map,  // [n, k], box [W_SHARE, CHUNK]
    const __grid_constant__ TensorMap x_map,  // [m, k], box [ROWS, CHUNK]
    scalar_t* out,                            // [m, n / 2], rows at multiples of 16 bytes
    int m, int n, int k, int out_stride,
    int band)                                 // heights of tiles, see Tiles
{
  extern __shared__ u8 raw[];
  const Ring ring(raw);
  const Tiles tiles(m, n, band);
  const int num_chunks = (k + CHUNK - 1) / CHUNK;
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0);  // uniform, as the compiler can see
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(ring.full(i), 1);
      mbarrier_init(ring.empty(i), READERS * CLUSTER);
    }
    mbarrier_init_fence();
  }
  cluster_meet();  // nothing arrives in a block before its barriers exist
  if (group == GROUPS) {
    registers_give<REGISTERS_TO_FETCH>();
    if (threadIdx.x == 128 * GROUPS) produce(ring, tiles, num_chunks, &w_map, &x_map);
  } else {
    registers_take<REGISTERS>();
    grid_dependency_wait();  // out may be memory that the kernel before this one reads
    grid_dependency_launch();
    consume(ring, tiles, num_chunks, group, out, out_stride, m, n / 2);
  }
  if (CLUSTER > 1) cluster_meet();  // blocks arrive at each other's barriers to the last
}
