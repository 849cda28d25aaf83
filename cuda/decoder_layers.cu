// All layers of a decoder for a step of up to 8 rows, in one kernel: see engine/ops/decoder_layers.py.
//
// As many blocks as the device has multiprocessors, all running at once, go through the phases of a layer together:
//
//   hidden ─qkv─► qkv ─attention─► attended ─output─► middle ─gate, up─► inner ─down─► hidden
//
// Each block has a share of every product's outputs, and needs all outputs of the one before. It takes each number as
// it comes, without a barrier (lamport.cuh). Its next weights, in the order of phases and layers, stream into its
// shared memory all the time (weight_ring.cuh).
//
//   warps 0 to 7   multiply and attend
//   warp 8         fetches weights
//   warp 9         empties vectors that all have read; asks for keys and values
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
static_assert(SYNC_THREADS == THREADS);

typedef BlockProduct<QKV, HIDDEN_SIZE, false, true, false> QkvProduct;
typedef BlockProduct<HIDDEN_SIZE, ATTENDED, false, false, true> OutputProduct;
typedef BlockProduct<INNER_SIZE, HIDDEN_SIZE, true, true, false> GateUpProduct;
typedef BlockProduct<HIDDEN_SIZE, INNER_SIZE, false, false, true> DownProduct;

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

// Vectors are empty between launches, all rows of them, but for `inner`.
struct Vectors {
  scalar_t* hidden;   // [m, HIDDEN_SIZE]: the first layer's and the last one's, not of the kind that is emptied
  scalar_t* qkv;      // [MAX_ROWS, QKV]
  scalar_t* middle;   // [MAX_ROWS, HIDDEN_SIZE]: behind attention
  scalar_t* inner;    // [MAX_ROWS, INNER_SIZE]
  scalar_t* next;     // [MAX_ROWS, HIDDEN_SIZE]: of the next layer
  PartOperands parts;  // attended: [MAX_ROWS, ATTENDED]
};

struct Launch {
  Vectors vectors;
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

// This block's share of v [rows, OUTPUTS] is empty again.
template <int OUTPUTS> DEV void empty(scalar_t* v, Slice slice, int rows) {
  for (int e = threadIdx.x & 31; e < rows * slice.count; e += 32)
    store2_l2(v + e / slice.count * OUTPUTS + slice.first + e % slice.count, (u16)EMPTY);
}

// What is the same for all layers; a warp's `tile` is its first one.
DEV AttentionOperands attention_of(const Launch& l, const RowItem& item, int tile) {
  const int row = max(item.row, 0);
  AttentionOperands op{l.vectors.qkv, nullptr, nullptr, nullptr, l.block_table + (i64)l.rows[row] * l.table_stride, 0, 0,
                       l.cos, l.sin, row * l.angle_stride, l.vectors.parts, l.scale, l.eps};
  if (item.row < 0) return op;
  if (item.begin + tile * TILE < item.end) op.first_block = op.table_row[(item.begin + tile * TILE) / BLOCK_SIZE];
  if (item.has_newest()) op.newest_block = op.table_row[(item.end - 1) / BLOCK_SIZE];
  return op;
}

// The cleaner. Attention reads parts of qkv only, so behind it nobody knows yet what all have read.
DEV void clean(const Launch& l) {
  grid_dependency_wait();
  const Slices slices;
  const Vectors& v = l.vectors;
  const RowItem item = RowItem::choose(l.seq_lens, l.m);
  const AttentionOperands attention = attention_of(l, item, 0);
  auto all_is_read = [] {
    __syncwarp();
    named_barrier_sync(READ_BARRIER, WITH_CLEANER);
    named_barrier_arrive(SUMS_BARRIER, WITH_CLEANER);
  };
  for (int i = 0; i < l.num_layers; i++) {
    if (item.row >= 0) prefetch_tiles(item, attention.table_row, l.layers[i].k_cache, l.layers[i].v_cache);
    all_is_read();  // hidden, so everybody has read inner
    empty<INNER_SIZE>(v.inner, slices.inner, i == 0 ? MAX_ROWS : l.m);  // the last launch may have had other rows
    fence_l2();
    all_is_read();  // what attention made
    empty<HIDDEN_SIZE>(v.next, slices.hidden, l.m);
    empty<QKV>(v.qkv, slices.qkv, l.m);
    fence_l2();
    all_is_read();  // middle
    if (item.row >= 0) empty_parts(item, v.parts);
    fence_l2();
    all_is_read();  // inner
    empty<HIDDEN_SIZE>(v.middle, slices.hidden, l.m);
    fence_l2();
  }
}

DEV void compute(const Launch& l, const WeightRing& ring, Stopwatch watch, u8* smem) {
  grid_dependency_wait();
  grid_dependency_launch();
  const Slices slices;
  const Vectors& v = l.vectors;
  const int m = l.m;
  const RowItem item = RowItem::choose(l.seq_lens, m);
  AttentionOperands attention = attention_of(l, item, threadIdx.x / 32);
  RingPosition at;
  u8* area = smem + AREA_AT;
  float* sums = (float*)area;
  OutputProduct::Own own = {};  // this thread's of hidden
  OutputProduct::each_output(m, slices.hidden, [&](int p, int row, int i) {
    own[p] = v.hidden[row * HIDDEN_SIZE + slices.hidden.first + i];
  });
  for (int i = 0; i < l.num_layers; i++) {
    const Layer& layer = l.layers[i];
    const bool is_first = i == 0, is_last = i == l.num_layers - 1;
    attention.k_cache = layer.k_cache, attention.v_cache = layer.v_cache, attention.qk_norm = layer.qk_norm;
    QkvProduct::run({layer.qkv_bias, v.qkv, m, l.eps}, slices.qkv, [&](auto& x) {
      QkvProduct::load_inputs(x, is_first ? v.hidden : v.next, m, is_first, false);
    }, nullptr, ring, smem, at, watch, sums);
    if (item.row >= 0) attend(item, attention, watch, area);
    else for (int stamps = 0; stamps < 5; stamps++) watch.stamp();
    OutputProduct::run({layer.output_bias, v.middle, m, 0.f}, slices.hidden, [&](auto& x) {
      OutputProduct::load_inputs(x, v.parts.out, m, false, true);
    }, own, ring, smem, at, watch, sums);
    GateUpProduct::run({layer.gate_up_bias, v.inner, m, l.eps}, slices.inner, [&](auto& x) {
      GateUpProduct::load_inputs(x, v.middle, m, false, false);
    }, nullptr, ring, smem, at, watch, sums);
    DownProduct::run({layer.down_bias, is_last ? v.hidden : v.next, m, 0.f}, slices.hidden, [&](auto& x) {
      DownProduct::load_inputs(x, v.inner, m, false, false);
    }, own, ring, smem, at, watch, sums);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) decoder_layers(
    scalar_t* hidden, scalar_t* qkv, scalar_t* middle, scalar_t* inner, scalar_t* next,  // see Vectors
    scalar_t* attended, float* part_o, float* part_lse, u32* arrivals,  // PartOperands
    const Layer* layers, int num_layers, int m,
    const int* block_table,    // [.., table_stride]
    const int* rows,           // [m] of the block table
    const int* seq_lens,       // [m]
    int table_stride,
    const float* cos, const float* sin,  // [m, >= HEAD_DIM / 2], angle_stride floats from row to row
    int angle_stride, float scale, float eps
#ifdef PROFILE
    , u64* stamps              // [gridDim.x, num_layers, 5 phases, 5]: waits, has x, products done, met, results left
#endif
    )
{
  extern __shared__ __align__(1024) u8 smem[];
  const u32 start = shared_address(smem);
  const WeightRing ring{start, start + BARRIERS_AT, start + BARRIERS_AT + 8 * FLIGHTS};
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  const Launch launch{{hidden, qkv, middle, inner, next, {attended, part_o, part_lse, arrivals}},
                      layers, num_layers, m, block_table, rows, seq_lens, table_stride, cos, sin, angle_stride, scale, eps};
  if (threadIdx.x >= THREADS) {
    registers_give<72>();  // a warpgroup's, though two warps work
    if (threadIdx.x < THREADS + 32) fetch_weights(launch, ring);
    else if (threadIdx.x < THREADS + 64) clean(launch);
  } else {
    registers_take<216>();
    Stopwatch watch;
#ifdef PROFILE
    watch.stamps = stamps + (i64)blockIdx.x * num_layers * 25;
#endif
    compute(launch, ring, watch, smem);
  }
}
