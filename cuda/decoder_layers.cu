// All layers of a decoder for a step of up to 8 rows, in one kernel: see engine/ops/decoder_layers.py.
//
// As many blocks as the device has multiprocessors, all running at once, go through the phases of a layer together:
//
//   hidden ─qkv─► qkv ─attention─► attended ─output─► hidden ─gate, up─► inner ─down─► hidden
//                |               |                  |                  |              |
//                 ╰──────────────┴── barriers of the grid ─────────────┴──────────────╯
//
// Each block has a share of every product's outputs. Between two phases it waits for all others, about a microsecond;
// but its next weights, in the order of phases and layers, stream into its shared memory all the time
// (weight_ring.cuh), fetched by a warp that takes no part in barriers.
//
//   -DSCALAR_BF16=1 | -DSCALAR_FP16=1   -DHIDDEN  -DINNER   multiples of 64, as is NUM_HEADS * HEAD_DIM
//   -DSMEM_BYTES=n of the launch, and those of the files below; -DPROFILE=1: times of all phases (scripts only)
#define ROPE_FP32 1
#define SYNC_THREADS 256
#include "common/dependent_launch.cuh"
#include "common/dtype.cuh"
#include "common/decode_attention.cuh"
#include "common/decode_product.cuh"

constexpr int ATTENDED = NUM_HEADS * HEAD_DIM, QKV = ATTENDED + 2 * NUM_KV_HEADS * HEAD_DIM;
constexpr int PART_COUNTERS = 32;  // of the grid's barrier, in a line of their own; then of rows' parts
static_assert(SYNC_THREADS == THREADS);

typedef BlockProduct<QKV, HIDDEN_SIZE, false, true> QkvProduct;
typedef BlockProduct<HIDDEN_SIZE, ATTENDED, false, false> OutputProduct;
typedef BlockProduct<INNER_SIZE, HIDDEN_SIZE, true, true> GateUpProduct;
typedef BlockProduct<HIDDEN_SIZE, INNER_SIZE, false, false> DownProduct;

constexpr int SUM_BYTES = 4 * larger(larger(sum_floats(QKV, false), sum_floats(HIDDEN_SIZE, false)), sum_floats(INNER_SIZE, true));
constexpr int AREA_AT = RING_BYTES;
constexpr int BARRIERS_AT = AREA_AT + (larger(SUM_BYTES, ATTENTION_BYTES) + 127) / 128 * 128;
static_assert(BARRIERS_AT + 2 * 8 * FLIGHTS <= SMEM_BYTES, "more shared memory than the launch asks for");

// Laid out as in engine/ops/decoder_layers.py.
struct Layer {
  const scalar_t *qkv, *qkv_bias;        // [QKV, HIDDEN_SIZE], [QKV] or null; with the norm's weight in it
  const scalar_t *output, *output_bias;  // [HIDDEN_SIZE, ATTENDED]
  const scalar_t *gate_up, *gate_up_bias;  // [2 * INNER_SIZE, HIDDEN_SIZE], interleaved; with the norm's weight
  const scalar_t *down, *down_bias;      // [HIDDEN_SIZE, INNER_SIZE]
  const scalar_t* qk_norm;               // [NUM_HEADS + NUM_KV_HEADS, HEAD_DIM], or null
  scalar_t *k_cache, *v_cache;           // [blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
  u64 unused;
};

struct Launch {
  scalar_t *hidden, *qkv, *attended, *inner;
  float *part_o, *part_lse;
  u32* counters;
  const Layer* layers;
  int num_layers, m;
  const int *block_table, *rows, *seq_lens;
  int table_stride;
  const float *cos, *sin;
  int angle_stride;
  float scale, eps;
};

// The shares of this block.
struct Slices {
  Slice qkv = Slice::of(QKV), hidden = Slice::of(HIDDEN_SIZE), inner = Slice::of(INNER_SIZE);
};

DEV void fetch_weights(const Launch& launch, const WeightRing& ring) {
  const Slices slices;
  WeightSource source{ring};
  for (int i = 0; i < launch.num_layers; i++) {
    const Layer& layer = launch.layers[i];
    source.fetch<HIDDEN_SIZE, false>(layer.qkv, slices.qkv);
    source.fetch<ATTENDED, false>(layer.output, slices.hidden);
    source.fetch<HIDDEN_SIZE, true>(layer.gate_up, slices.inner);
    source.fetch<INNER_SIZE, false>(layer.down, slices.hidden);
  }
}

DEV void compute(const Launch& l, const WeightRing& ring, GridBarrier grid, u8* smem) {
  grid_dependency_wait();
  grid_dependency_launch();
  const Slices slices;
  const RowItem item = RowItem::choose(l.seq_lens, l.m);
  const i64 row = max(item.row, 0), angle = row * l.angle_stride;
  const int* table_row = l.block_table + (i64)l.rows[row] * l.table_stride;
  RingPosition at;
  u8* area = smem + AREA_AT;
  float* sums = (float*)area;
  for (int i = 0; i < l.num_layers; i++) {
    const Layer& layer = l.layers[i];
    QkvProduct::run({l.hidden, layer.qkv_bias, nullptr, l.qkv, l.m, l.eps}, slices.qkv, ring, smem, at, grid, sums);
    if (item.row >= 0) {
      const AttentionOperands op{l.qkv, layer.k_cache, layer.v_cache, layer.qk_norm, table_row, l.cos + angle,
                                 l.sin + angle, l.attended, l.part_o, l.part_lse, l.counters + PART_COUNTERS, l.scale, l.eps};
      attend(item, op, grid, area);
    } else {
      grid.wait();  // or this arrival would count as one at the barrier before
      grid.stamp();
      grid.stamp();
    }
    grid.arrive();
    OutputProduct::run({l.attended, layer.output_bias, l.hidden, l.hidden, l.m, 0.f}, slices.hidden, ring, smem, at,
                       grid, sums);
    GateUpProduct::run({l.hidden, layer.gate_up_bias, nullptr, l.inner, l.m, l.eps}, slices.inner, ring, smem, at,
                       grid, sums);
    DownProduct::run({l.inner, layer.down_bias, l.hidden, l.hidden, l.m, 0.f}, slices.hidden, ring, smem, at, grid,
                     sums);
  }
  grid.leave();
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) decoder_layers(
    scalar_t* hidden,          // [m, HIDDEN_SIZE], changed in place
    scalar_t* qkv,             // [m, QKV]
    scalar_t* attended,        // [m, ATTENDED]
    scalar_t* inner,           // [m, INNER_SIZE]
    float* part_o,             // [gridDim.x / NUM_KV_HEADS, ATTENDED]
    float* part_lse,           // [gridDim.x / NUM_KV_HEADS, NUM_HEADS]
    u32* counters,             // [PART_COUNTERS + MAX_ROWS * NUM_KV_HEADS], zero before and after
    const Layer* layers, int num_layers, int m,
    const int* block_table,    // [.., table_stride]
    const int* rows,           // [m] of the block table
    const int* seq_lens,       // [m]
    int table_stride,
    const float* cos, const float* sin,  // [m, >= HEAD_DIM / 2], angle_stride floats from row to row
    int angle_stride, float scale, float eps
#ifdef PROFILE
    , u64* stamps              // [gridDim.x, num_layers, 5 phases, 6]: see grid_barrier.cuh
#endif
    )
{
  extern __shared__ __align__(1024) u8 smem[];
  const u32 start = shared_address(smem);
  const WeightRing ring{start, start + BARRIERS_AT, start + BARRIERS_AT + 8 * FLIGHTS};
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  const Launch launch{hidden, qkv, attended, inner, part_o, part_lse, counters, layers, num_layers, m, block_table,
                      rows, seq_lens, table_stride, cos, sin, angle_stride, scale, eps};
  if (threadIdx.x >= THREADS) {
    registers_give<40>();  // a warpgroup's, though one warp works
    if (threadIdx.x < THREADS + 32) fetch_weights(launch, ring);
  } else {
    registers_take<232>();
    GridBarrier grid{counters, counters + 1, 0};
#ifdef PROFILE
    grid.stamps = stamps + (i64)blockIdx.x * num_layers * 30;
#endif
    compute(launch, ring, grid, smem);
  }
}
