// silu(x G^T) * (x U^T) for many rows x, for Hopper; the contract is in engine/ops/gated_gemm_sm90.py.
//
// Blocks are persistent, one on an SM. A tile is 128 rows of x by TILE rows of W; one thread fetches chunks of
// 64 columns of both through a ring of STAGES stages (TMA), on from tile to tile. Two warpgroups have a tile each and
// take turns: one multiplies (wgmma; rows of x are M, rows of W are N) while the other applies gates and stores.
//
//   shared memory    x [128, 64]  W [TILE, 64]     STAGES times, each 128-byte swizzled
//   warpgroup        sums [128, TILE] in registers, of which it stores half as many outputs
//
//       group 0   tile 0, products | gates, outputs    | tile 2, products  | gates ...
//       group 1   (its turn comes) | tile 1, products  | gates, outputs    | tile 3 ...
//
// Rows of W are gate and up, interleaved by eights: neither is written, as a thread has both of an output.
// Rows of x and W that do not exist, and columns beyond the last, arrive as zeros.
//
//   -DSCALAR_BF16=1 | -DSCALAR_FP16=1
//   -DTILE=n       rows of W: a multiple of 64, and a size of N in common/sm90.cuh
//   -DSTAGES=n
#include "common/dtype.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma.cuh"
#include "common/sm90.cuh"
#include "common/vec.cuh"

constexpr int CHUNK = 64;  // columns
constexpr int GROUPS = 2;  // warpgroups that multiply
constexpr int HEIGHTS = 2, ROWS = 64 * HEIGHTS;
constexpr int X_BYTES = ROWS * 128, W_BYTES = TILE * 128, STAGE = X_BYTES + W_BYTES;
constexpr int QUARTETS = TILE / 64;  // 32 outputs each, of a row
static_assert(TILE % 64 == 0 && TILE <= 256, "the lanes of a quad store one octet of outputs each");

// Of a thread, while it computes and while it fetches: 64 KB of registers for all warpgroups.
constexpr int REGISTERS = TILE > 160 ? 240 : 232;
constexpr int REGISTERS_TO_FETCH = TILE > 160 ? 24 : 40;

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
  // "full": a stage's bytes are there; "empty": the warps that read it are done.
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

// Tiles of a block. All blocks go through bands of `band` tiles down x, in each from column to column: so what runs
// at a time reads few rows of either matrix.
struct Tiles {
  int count, heights, columns, band;
  DEV Tiles(int m, int n, int band) : band(band) {
    heights = (m + ROWS - 1) / ROWS, columns = (n + TILE - 1) / TILE;
    count = (heights * columns - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
  }
  DEV Tile at(int number) const {
    const int item = blockIdx.x + number * gridDim.x, in_band = item % (band * columns);
    const int top = item / (band * columns) * band, here = max(1, min(band, heights - top));  // 1: behind the last
    return {(top + in_band % here) * ROWS, in_band / here * TILE};
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
  tma_load_2d(to, map, barrier, at.chunk * CHUNK, at.tile.w_row);
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

struct Params {
  scalar_t* out;  // [m, n / 2]
  int m, n;
  i64 out_stride;
};

// Of 64 rows of a tile, by a warpgroup. A lane has sums of rows g and g + 8 of its warp, columns 2 t and 2 t + 1 of all
// octets; of four octets of outputs it writes the t-th.
struct Results {
  int rows_left, columns_left;
  scalar_t* first;
  DEV Results(const Params& p, const Tile& tile, int height) {
    const int row = tile.row + height * 64 + (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7);
    const int column = tile.w_row / 2 + 8 * (threadIdx.x & 3);
    rows_left = p.m - row, columns_left = p.n / 2 - column;
    first = p.out + row * p.out_stride + column;
  }
  DEV bool is_inside(int quartet, int lower) const { return 8 * lower < rows_left && 32 * quartet < columns_left; }
  DEV scalar_t* at(const Params& p, int quartet, int lower) const { return first + 8 * lower * p.out_stride + 32 * quartet; }
};

DEV float gated(float gate, float up) {
  constexpr float LOG2_E = 1.4426950408889634f;
  return gate * reciprocal_fast(1.f + exp2_fast(-LOG2_E * gate)) * up;
}

DEV void write(const Params& p, const Tile& tile, int height, const float (&sums)[TILE / 2]) {
  const Results results(p, tile, height);
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
      transpose_quad(words, threadIdx.x & 3);
      if (results.is_inside(i, lower))
        store16(results.at(p, i, lower), make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

// --- products: one warpgroup ---

DEV void consume(const Params& p, const Ring& ring, const Tiles& tiles, int num_chunks, int group) {
  auto take_turn = [&] { named_barrier_sync(1 + group, 128 * GROUPS); };
  auto pass_turn = [&] { named_barrier_arrive(2 - group, 128 * GROUPS); };
  auto release = [&](u32 stage) {
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(ring.empty(stage));
  };
  if (group == 1) pass_turn();  // group 0 begins
  for (int number = group; number < tiles.count; number += GROUPS) {
    const Tile tile = tiles.at(number);
    Sums sums;
    u32 before = 0;  // the stage of the chunk before
    Place place(number * num_chunks);
    take_turn();  // not to mistake an earlier round's parity for this one's, too: every chunk before has arrived
    for (int chunk = 0; chunk < num_chunks; chunk++) {
      mbarrier_wait(ring.full(place.stage), place.parity);
      const u32 x = ring.x(place.stage), w = ring.w(place.stage);
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
    if (TILE <= 128 && p.m < 0) __trap();
#pragma unroll
    for (int h = 0; h < HEIGHTS; h++) write(p, tile, h, sums[h]);
  }
  if (group == tiles.count % GROUPS) take_turn();  // the last one passed, so that no barrier stays half full
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) gated_gemm_sm90(
    const __grid_constant__ TensorMap w_map,  // [n, k], box [TILE, CHUNK]
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
      mbarrier_init(ring.empty(i), 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (group == GROUPS) {
    registers_give<REGISTERS_TO_FETCH>();
    if (threadIdx.x == 128 * GROUPS) produce(ring, tiles, num_chunks, &w_map, &x_map);
  } else {
    registers_take<REGISTERS>();
    grid_dependency_wait();  // the kernel before this one may read or write out
    grid_dependency_launch();
    consume({out, m, n, out_stride}, ring, tiles, num_chunks, group);
  }
}
