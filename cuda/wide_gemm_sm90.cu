// y = x W^T for up to 256 rows x, with what surrounds it in a decoder, for Hopper: the contract is in
// engine/ops/fused_product.py, how a product is cut up in engine/ops/wide_gemm_sm90.py.
//
// A block has all rows of x and a tile of W's rows. One thread fetches chunks of 64 columns of both through a
// ring of STAGES stages (TMA); warpgroups multiply them (wgmma; rows of x are M, rows of W are N) and keep the
// sums in registers:
//
//   shared memory    x [ROWS, 64]  W [TILE, 64]     STAGES times, each 128-byte swizzled
//   warpgroup        sums [64 HEIGHTS, TILE] of the tile's [ROWS, TILE]
//
//   CLUSTER=1    With more tiles than blocks each block takes several, one after another, and loads do not stop
//                in between.
//   CLUSTER=2|4  The blocks of a cluster take one tile, and each a share of its chunks: none reads all of x. In
//                the end they send each other their sums, of some results to each block, which adds them in
//                order of the blocks.
//
// Of x, rows that exist are fetched, and no more: to fill others with zeros took longer than to read them. What
// lies in their place makes sums that are not stored.
//
//   -DSCALAR_BF16=1 | -DSCALAR_FP16=1
//   -DWARPGROUPS=n -DHEIGHTS=n   rows of x: 64 WARPGROUPS HEIGHTS
//   -DTILE=n                     rows of W; a size of N in common/sm90.cuh
//   -DTHREADS=n                  of these warpgroups, and 32 or 128 that fetch
//   -DSTAGES=n -DCLUSTER=1|2|4
//   -DNORMED=0|1 -DGATED=0|1 -DRESIDUAL=0|1
//   -DFLOAT_OUT=0|1              results are not rounded
#include "common/dtype.cuh"
#include "common/cluster.cuh"
#include "common/cluster_send.cuh"
#include "common/dependent_launch.cuh"
#include "common/gate.cuh"
#include "common/mma.cuh"
#include "common/sm90.cuh"
#include "common/vec.cuh"

constexpr int CHUNK = 64;  // columns
constexpr int ROWS = 64 * WARPGROUPS * HEIGHTS;
constexpr int X_BYTES = ROWS * 128, W_BYTES = TILE * 128, STAGE = X_BYTES + W_BYTES;
constexpr bool SPLIT = CLUSTER > 1;
#if FLOAT_OUT
typedef float out_t;
#else
typedef scalar_t out_t;
#endif
static_assert(!(FLOAT_OUT && RESIDUAL), "a residual has no other type than the result");

constexpr int BLENDED = GATED ? 2 : 1;               // octets of sums for one of outputs: gate and up, or itself
constexpr int OCTETS = TILE / 8;                     // of a warpgroup's sums; a lane has 4 numbers of each
constexpr int OUT_OCTETS = OCTETS / BLENDED;
constexpr int QUARTETS = (OUT_OCTETS + 3) / 4;       // four octets, of which each lane of a quad stores one
constexpr int BANDS = WARPGROUPS * 4 * HEIGHTS;      // 16 rows and TILE columns each, of one warp
static_assert(OCTETS % BLENDED == 0, "gate and up are in one tile");

// A ninth warp takes as many registers as a third warpgroup: of two warpgroups and a warp none has more than 168.
// Where sums are more, a whole warpgroup fetches and gives its registers to the others.
constexpr bool MOVES_REGISTERS = THREADS == 128 * (WARPGROUPS + 1);
// So that blocks of the next kernel find registers beside this one's.
constexpr int BLOCKS_PER_SM = WARPGROUPS <= 2 && HEIGHTS * TILE <= 80 && !(SPLIT && GATED) ? 2 : 1;
// Where registers are left, bias and residual are on their way during the products.
constexpr bool EARLY = !SPLIT && HEIGHTS * TILE <= 64;

typedef float Sums[HEIGHTS][TILE / 2];  // by 64 rows of x; see wgmma in common/sm90.cuh

// Stages in shared memory and two barriers for each. Stages start at multiples of 1024 bytes.
struct Ring {
  u8* memory;
  u32 stages, barriers;
  DEV explicit Ring(u8* raw) {
    const u32 start = shared_address(raw);
    stages = (start + 1023) & ~1023u;
    barriers = stages + STAGES * STAGE;
    memory = raw + (stages - start);
  }
  DEV u32 x(u32 stage) const { return stages + stage * STAGE; }
  DEV u32 w(u32 stage) const { return stages + stage * STAGE + X_BYTES; }
  DEV u32 full(u32 stage) const { return barriers + 8 * stage; }
  DEV u32 empty(u32 stage) const { return barriers + 8 * (STAGES + stage); }
  // SPLIT: all blocks of the cluster have read their stages; what they send to this one is there.
  DEV u32 ready() const { return barriers + 16 * STAGES; }
  DEV u32 received() const { return ready() + 8; }
};

// Where in the ring, and which parity the full barrier has when this round's bytes are there.
struct Place {
  u32 stage = 0, parity = 0;
  DEV void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// What a block does: the same columns of several tiles.
struct Share {
  int rank;                            // in its cluster
  int first_row, row_step, num_tiles;  // of W, from tile to tile
  int first_chunk, end_chunk;          // of columns
  DEV Share(int n, int num_chunks) {
    const int cluster = blockIdx.x / CLUSTER, num_clusters = gridDim.x / CLUSTER;
    rank = blockIdx.x % CLUSTER;
    first_row = cluster * TILE, row_step = num_clusters * TILE;
    num_tiles = SPLIT ? 1 : ((n + TILE - 1) / TILE - cluster + num_clusters - 1) / num_clusters;
    first_chunk = rank * num_chunks / CLUSTER, end_chunk = (rank + 1) * num_chunks / CLUSTER;
  }
  DEV int num_units() const { return num_tiles * (end_chunk - first_chunk); }
};

struct Params {
  out_t* out;                // [m, outputs]
  const scalar_t* residual;  // the same; may be `out`
  const scalar_t* bias;      // [n] or null
  int m, n, out_stride, residual_stride;
  float inverse_k, eps;
};

// --- loading ---

// A chunk of a tile, and its place.
struct Cursor {
  int row, chunk;
  Place place;
  DEV void advance(const Share& share) {
    if (++chunk == share.end_chunk) chunk = share.first_chunk, row += share.row_step;
    place.advance();
  }
};

// One thread.
struct Producer {
  const Ring& ring;
  const Share& share;
  const TensorMap *w_map, *x_map;
  u32 unit_bytes;
  int num_units, ahead;  // the first `ahead` units find their stages empty
  Cursor w, x;           // what is fetched next

  DEV Producer(const Ring& ring, const Share& share, const TensorMap* w_map, const TensorMap* x_map, int m)
      : ring(ring), share(share), w_map(w_map), x_map(x_map), unit_bytes(W_BYTES + m * 128),
        num_units(share.num_units()), ahead(min(num_units, STAGES)), w{share.first_row, share.first_chunk}, x(w) {}
  DEV void load_w() {
    const u32 barrier = ring.full(w.place.stage);
    mbarrier_arrive_expect(barrier, unit_bytes);
    tma_load_2d(ring.w(w.place.stage), w_map, barrier, w.chunk * CHUNK, w.row);
    w.advance(share);
  }
  DEV void load_x() {
    tma_load_2d(ring.x(x.place.stage), x_map, ring.full(x.place.stage), x.chunk * CHUNK, 0);
    x.advance(share);
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

// --- results ---

// Four octets of outputs in a band of 16 rows. A lane has sums of rows g and g + 8, columns 2 t and 2 t + 1 of
// all four; it stores octet t of these rows.
struct Quartet {
  int row, column;  // of x, of out
  int count;        // octets that there are
  DEV Quartet(int band, int quartet, int first_row) {
    row = band * 16;
    column = first_row / BLENDED + quartet * 32;
    count = min(4, OUT_OCTETS - quartet * 4);
  }
  DEV int lane_row(int lower) const { return row + 8 * lower + (threadIdx.x >> 2 & 7); }
  DEV int lane_column() const { return column + 8 * (threadIdx.x & 3); }
  DEV bool is_inside(const Params& p, int lower) const {
    return (threadIdx.x & 3) < count && lane_row(lower) < p.m && lane_column() < p.n / BLENDED;
  }
};

typedef u32 Bias[4 * BLENDED];  // columns 2 t and 2 t + 1 of each octet of sums
typedef uint4 Residual[2];      // octet t of outputs, in rows g and g + 8

DEV void load_bias(const Params& p, const Quartet& q, Bias& bias) {
  const int first = q.column * BLENDED;
#pragma unroll
  for (int i = 0; i < 4 * BLENDED; i++) {
    const bool is_there = p.bias && i < q.count * BLENDED && first + i * 8 < p.n;
    bias[i] = is_there ? *(const u32*)(p.bias + first + i * 8 + 2 * (threadIdx.x & 3)) : 0;
  }
}
DEV void load_residual(const Params& p, const Quartet& q, Residual& residual) {
#pragma unroll
  for (int lower = 0; lower < 2; lower++) {
    residual[lower] = make_uint4(0, 0, 0, 0);
    if (RESIDUAL && q.is_inside(p, lower))
      residual[lower] = load16(p.residual + (i64)q.lane_row(lower) * p.residual_stride + q.lane_column());
  }
}

// Of a row, by the sum of its squares.
DEV float norm_factor(const Params& p, float squares) { return rsqrtf(squares * p.inverse_k + p.eps); }

// `sums`: 4 numbers of each octet of sums. `factor`: of rows g and g + 8.
DEV void write(const Params& p, const Quartet& q, const float* sums, const float (&factor)[2], const Bias& bias, const Residual& residual) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int lower = 0; lower < 2; lower++) {
    const uint4& v = residual[lower];
    u32 words[4] = {v.x, v.y, v.z, v.w};
    if (RESIDUAL) transpose_quad(words, t);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i >= q.count) continue;
      float y[2], added[2], b[BLENDED][2];
#pragma unroll
      for (int j = 0; j < BLENDED; j++) unpack2(bias[i * BLENDED + j], b[j][0], b[j][1]);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float parts[BLENDED];
#pragma unroll
        for (int j = 0; j < BLENDED; j++) {
          const float sum = sums[4 * (i * BLENDED + j) + 2 * lower + e];
          parts[j] = (NORMED ? sum * factor[lower] : sum) + b[j][e];
        }
        y[e] = GATED ? silu(parts[0]) * parts[BLENDED - 1] : parts[0];
      }
      if (FLOAT_OUT) {  // the four lanes of a quad store 32 bytes next to each other
        const int row = q.lane_row(lower), column = q.column + 8 * i;
        if (row < p.m && column < p.n / BLENDED)
          *(float2*)((float*)p.out + (i64)row * p.out_stride + column + 2 * t) = make_float2(y[0], y[1]);
        continue;
      }
      unpack2(words[i], added[0], added[1]);
      words[i] = RESIDUAL ? pack2(y[0] + added[0], y[1] + added[1]) : pack2(y[0], y[1]);
    }
    if (FLOAT_OUT) continue;
    transpose_quad(words, t);
    if (q.is_inside(p, lower))
      store16((scalar_t*)p.out + (i64)q.lane_row(lower) * p.out_stride + q.lane_column(), make_uint4(words[0], words[1], words[2], words[3]));
  }
}

// --- sums of a share of the chunks, to be added to those of the cluster's other blocks ---
//
// Quartets of all bands are dealt out to the blocks. They arrive where the stages were:
//
//   [quartets of this block] [CLUSTER senders]   octets of sums, 32 lanes each; NORMED: squares of rows g and g + 8

constexpr int MOST_OCTETS = OCTETS < 4 * BLENDED ? OCTETS : 4 * BLENDED;  // of sums, of a quartet
constexpr int PARCEL = MOST_OCTETS * 32 + (NORMED ? 8 : 0);               // float4 of a quartet from a block
constexpr int DEALT = (BANDS * QUARTETS + CLUSTER - 1) / CLUSTER;         // quartets of a block, at most
static_assert(!SPLIT || DEALT * CLUSTER * PARCEL * 16 <= STAGES * STAGE, "parcels fit where the stages were");

DEV u32 parcel_of(int item, int sender) { return (item / CLUSTER * CLUSTER + sender) * PARCEL; }
DEV Quartet quartet_of(int item, int first_row) { return Quartet(item / QUARTETS, item % QUARTETS, first_row); }

// Bytes that this block will receive.
DEV u32 bytes_to_receive(const Params& p, const Share& share) {
  u32 bytes = 0;
  for (int item = share.rank; item < BANDS * QUARTETS; item += CLUSTER) {
    const Quartet q = quartet_of(item, share.first_row);
    if (q.row < p.m) bytes += CLUSTER * 16 * (q.count * BLENDED * 32 + (NORMED ? 8 : 0));
  }
  return bytes;
}

DEV void send(const Ring& ring, int item, int count, int sender, const float* sums, const float (&squares)[2]) {
  const int lane = threadIdx.x & 31, receiver = item % CLUSTER;
  const u32 to = ring.stages + parcel_of(item, sender) * 16;
#pragma unroll
  for (int i = 0; i < 4 * BLENDED; i++)
    if (i < count * BLENDED)
      send_float4(to + (i * 32 + lane) * 16, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]), ring.received(), receiver);
  if (NORMED && (lane & 3) == 0)
    send_float4(to + (MOST_OCTETS * 32 + (lane >> 2)) * 16, make_float4(squares[0], squares[1], 0.f, 0.f), ring.received(), receiver);
}

// One warp: quartets of this block.
DEV void add_parcels(const Params& p, const Ring& ring, const Share& share) {
  const int lane = threadIdx.x & 31;
  for (int item = (threadIdx.x >> 5) * CLUSTER + share.rank; item < BANDS * QUARTETS; item += 4 * WARPGROUPS * CLUSTER) {
    const Quartet q = quartet_of(item, share.first_row);
    if (q.row >= p.m) continue;
    Bias bias;
    Residual residual;
    load_bias(p, q, bias);
    load_residual(p, q, residual);
    mbarrier_wait(ring.received(), 0);
    float sums[16 * BLENDED] = {}, factor[2] = {};
#pragma unroll
    for (int sender = 0; sender < CLUSTER; sender++) {
      const float4* parcel = (const float4*)ring.memory + parcel_of(item, sender);
#pragma unroll
      for (int i = 0; i < 4 * BLENDED; i++)
        if (i < q.count * BLENDED) {
          const float4 v = parcel[i * 32 + lane];
          sums[4 * i] += v.x, sums[4 * i + 1] += v.y, sums[4 * i + 2] += v.z, sums[4 * i + 3] += v.w;
        }
      if (NORMED) {
        const float4 squares = parcel[MOST_OCTETS * 32 + (lane >> 2)];
        factor[0] += squares.x, factor[1] += squares.y;
      }
    }
    factor[0] = norm_factor(p, factor[0]), factor[1] = norm_factor(p, factor[1]);
    write(p, q, sums, factor, bias, residual);
  }
}

// --- products ---

// Of half a row of x: a lane has half lane % 2 of row lane / 2. `band`: 16 rows of 128 bytes.
DEV float squares_of_half(const u8* band) {
  const int lane = threadIdx.x & 31, row = lane >> 1;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float x[8], sum = 0.f;
    unpack16(load16(band + row * 128 + (((lane & 1) * 4 + i) ^ (row & 7)) * 16), x);
#pragma unroll
    for (int e = 0; e < 8; e++) sum += x[e] * x[e];
    total += sum;
  }
  return total;
}

// From the halves of 16 rows, which lanes have so, to rows g and g + 8 of each lane.
DEV void squares_of_rows(float half, float (&squares)[2]) {
  const float row = half + __shfl_xor_sync(~0u, half, 1);
  const int g = threadIdx.x >> 2 & 7;
  squares[0] = __shfl_sync(~0u, row, 2 * g);
  squares[1] = __shfl_sync(~0u, row, 2 * g + 16);
}

// One warpgroup.
DEV void consume(const Params& p, const Ring& ring, const Share& share) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, group = threadIdx.x >> 7;
  const u32 x_offset = group * HEIGHTS * 64 * 128;
  const int first_band = group * 4 * HEIGHTS + warp;  // and every fourth
  auto release = [&](u32 stage) {
    if (NORMED) __syncwarp();  // all lanes have read x
    if (lane == 0) mbarrier_arrive(ring.empty(stage));
  };
  float half_squares[HEIGHTS] = {}, factor[HEIGHTS][2] = {};
  Place place;
  for (int tile = 0; tile < share.num_tiles; tile++) {
    const int first_row = share.first_row + tile * share.row_step;
    Bias bias[HEIGHTS][QUARTETS];
    Residual residual[HEIGHTS][QUARTETS];
    auto for_each_quartet = [&](auto action) {
#pragma unroll
      for (int h = 0; h < HEIGHTS; h++)
#pragma unroll
        for (int i = 0; i < QUARTETS; i++) action(Quartet(first_band + 4 * h, i, first_row), h, i);
    };
    auto load_addends = [&](const Quartet& q, int h, int i) {
      load_bias(p, q, bias[h][i]);
      load_residual(p, q, residual[h][i]);
    };
    if (EARLY) for_each_quartet(load_addends);
    Sums sums;
    u32 before = 0;  // the stage of the chunk before
    for (int chunk = share.first_chunk; chunk < share.end_chunk; chunk++) {
      mbarrier_wait(ring.full(place.stage), place.parity);
      const u32 x = ring.x(place.stage) + x_offset, w = ring.w(place.stage);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < CHUNK / 16; k++)
#pragma unroll
        for (int h = 0; h < HEIGHTS; h++)
          wgmma_ss(sums[h], descriptor_k_major(x + h * 64 * 128 + k * 32), descriptor_k_major(w + k * 32), chunk > share.first_chunk || k > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (chunk > share.first_chunk) release(before);
      if (NORMED && tile == 0) {
#pragma unroll
        for (int h = 0; h < HEIGHTS; h++)
          half_squares[h] += squares_of_half(ring.memory + place.stage * STAGE + x_offset + (h * 64 + warp * 16) * 128);
      }
      before = place.stage;
      place.advance();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < HEIGHTS; h++) wgmma_results(sums[h]);
    release(before);
    if (NORMED && tile == 0) {
#pragma unroll
      for (int h = 0; h < HEIGHTS; h++) {
        squares_of_rows(half_squares[h], factor[h]);
        if (!SPLIT) factor[h][0] = norm_factor(p, factor[h][0]), factor[h][1] = norm_factor(p, factor[h][1]);
      }
    }
    if (SPLIT) {
      if (lane < CLUSTER) mbarrier_arrive_at(ring.ready(), lane);
      mbarrier_wait(ring.ready(), 0);
    }
    for_each_quartet([&](const Quartet& q, int h, int i) {
      if (q.row >= p.m) return;
      if (SPLIT) {
        send(ring, (first_band + 4 * h) * QUARTETS + i, q.count, share.rank, sums[h] + i * 16 * BLENDED, factor[h]);
        return;
      }
      if (!EARLY) load_addends(q, h, i);
      write(p, q, sums[h] + i * 16 * BLENDED, factor[h], bias[h][i], residual[h][i]);
    });
  }
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, BLOCKS_PER_SM) wide_gemm_sm90(
    const __grid_constant__ TensorMap w_map,  // [n, k], box [TILE, CHUNK]
    const __grid_constant__ TensorMap x_map,  // [m, k], box [m, CHUNK]
    out_t* out,                               // [m, n], gated: [m, n / 2]; rows at multiples of 16 bytes
    const scalar_t* residual,                 // the same, or null
    const scalar_t* bias,                     // [n] or null
    int m, int n, int k, int out_stride, int residual_stride,
    float eps)                                // of the norm
{
  extern __shared__ u8 raw[];
  const Ring ring(raw);
  const Share share(n, (k + CHUNK - 1) / CHUNK);
  const Params params{out, residual, bias, m, n, out_stride, residual_stride, 1.f / k, eps};
  Producer producer(ring, share, &w_map, &x_map, m);
  const bool produces = threadIdx.x == 128 * WARPGROUPS;
  if (produces) {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(ring.full(i), 1);
      mbarrier_init(ring.empty(i), 4 * WARPGROUPS);  // one arrival per consumer warp
    }
    if (SPLIT) {
      mbarrier_init(ring.ready(), 4 * WARPGROUPS * CLUSTER);
      mbarrier_init(ring.received(), 1);
      mbarrier_arrive_expect(ring.received(), bytes_to_receive(params, share));
    }
    mbarrier_init_fence();
    fence_async_proxy();
    producer.start();
  }
  cluster_meet();          // nothing is sent to a block before its barriers exist
  grid_dependency_wait();  // x and the residual are read and out is written from here on
  grid_dependency_launch();
  if (threadIdx.x >= 128 * WARPGROUPS) {
    if (MOVES_REGISTERS) registers_give<40>();
    if (produces) producer.run();
  } else {
    if (MOVES_REGISTERS) registers_take<WARPGROUPS == 2 ? 232 : 152>();
    consume(params, ring, share);
    if (SPLIT) add_parcels(params, ring, share);
  }
}
