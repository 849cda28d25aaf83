// Causal attention of prompt chunks over a paged KV cache, for Hopper: see engine/ops/paged_prefill_sm90.py.
//
// After FlashAttention-3 (https://arxiv.org/abs/2407.08608): one warpgroup moves memory, the others compute.
//
//   producer     K, V tiles of 128 keys through rings of STAGES tiles; queries once per work item
//   consumer c   query rows 64 c ... 64 c + 63 of the item, for every tile, the last one first:
//                  start S = Q K(i)              tensor cores
//                  start O += P V(i - 1)         tensor cores, while the next two lines run
//                  S = exp2(S - shift)           needs S only
//                  wait for V(i) and K(i - 1)
//                  wait for O, rescale it        hardly ever
//                  P = S in 16 bits
//
// The consumers take turns at starting products (a token passed between named barriers), so that some
// compute exponentials while another keeps the tensor cores busy. Blocks are persistent: block b takes
// items b, 2 G - 1 - b, 2 G + b, ... of a list sorted longest first (G: blocks), which evens out their sums.
// The rings run on from item to item, so the next item's tiles arrive while this one finishes.
//
// A row of queries sees the same tiles in the same order with any number of consumers, as tiles start at
// multiples of 128 keys and rows of other warps have no part in its numbers: its result is the same to the bit.
//
// The exponent's shift is not the row's largest score so far but one that it exceeds by at most GROWTH, so O
// and the sums need rescaling when the largest score grows by more, not whenever it grows (an idea of
// FlashAttention-4): the result is the same, as O and the sum have the same factor.
//
// The loops that wait for K and V also have another purpose: the assembler moves the wait for O up through
// straight-line code, in front of the exponentials that are to run meanwhile, but not through a loop.
//
//   -DSCALAR_BF16=1 | -DSCALAR_FP16=1   -DHEAD_DIM=64|128   -DBLOCK_SIZE=16|32|64|128
//   -DCONSUMERS=2|3                     a work item has 64 * CONSUMERS rows. With 3, products and exponentials
//                                       keep each other waiting less; heads of 64 leave the registers for it
//   -DSTAGES=n                          tiles of K, and of V, in shared memory
//   -DSOFTCAP=1                         scores become tanh(scores * scale_inner); not with 3 consumers
#include "common/dtype.cuh"
#include "common/mma.cuh"
#include "common/sm90.cuh"

constexpr int Q_ROWS = 64 * CONSUMERS;      // of a work item
constexpr int KEYS = 128;                   // of a tile
constexpr int HALVES = HEAD_DIM / 64;       // shared memory tiles are 64 columns wide
constexpr int Q_HALF = Q_ROWS * 128;        // bytes of one such tile
constexpr int KV_HALF = KEYS * 128;
constexpr int Q_BYTES = HALVES * Q_HALF;
constexpr int KV_BYTES = HALVES * KV_HALF;
constexpr int BLOCKS_PER_TILE = KEYS / BLOCK_SIZE;
constexpr float MASKED = -1e30f;            // finite, so that a fully masked row stays free of NaN
constexpr float GROWTH = 8.f;               // of a row's largest score without rescaling, in log2 units
constexpr float UNSEEN = -1e25f;            // limit of a row that has seen no key: above what is masked, below scores
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "head_dim");
static_assert(CONSUMERS == 2 || (CONSUMERS == 3 && HEAD_DIM == 64), "registers");
#ifdef SOFTCAP
static_assert(CONSUMERS == 2, "registers");
#endif
static_assert(KEYS % BLOCK_SIZE == 0 && BLOCKS_PER_TILE <= 32, "block_size");

// Shared memory of a block, as addresses. Tiles start at multiples of 1024 bytes, as their swizzle wants.
struct Smem {
  u32 q, k, v, barriers;
  DEV explicit Smem(const void* raw) {
    q = (shared_address(raw) + 1023) & ~1023u;
    k = q + Q_BYTES;
    v = k + STAGES * KV_BYTES;
    barriers = v + STAGES * KV_BYTES;
  }
  DEV u32 k_tile(u32 stage) const { return k + stage * KV_BYTES; }
  DEV u32 v_tile(u32 stage) const { return v + stage * KV_BYTES; }
  // "full": the producer's bytes are there; "empty": every consumer warp is done with them.
  DEV u32 k_full(u32 stage) const { return barriers + 8 * stage; }
  DEV u32 k_empty(u32 stage) const { return barriers + 8 * (STAGES + stage); }
  DEV u32 v_full(u32 stage) const { return barriers + 8 * (2 * STAGES + stage); }
  DEV u32 v_empty(u32 stage) const { return barriers + 8 * (3 * STAGES + stage); }
  DEV u32 q_full() const { return barriers + 8 * (4 * STAGES); }
  DEV u32 q_empty() const { return barriers + 8 * (4 * STAGES + 1); }
};

// A work item: up to Q_ROWS query rows of one head of one sequence.
struct Item {
  int batch_row, q_row, q_len, kv_len;  // q_row: the first query row, counted within the chunk
  int head;
  int first_pos;                        // position of the first query row
  int first_tile, last_tile;            // of keys
  DEV Item(const int4* work, int index, int num_heads, int window) {
    const int4 w = work[index / num_heads];
    head = index % num_heads;
    batch_row = w.x, q_row = w.y, q_len = w.z, kv_len = w.w;
    first_pos = kv_len - q_len + q_row;
    first_tile = max(0, first_pos - window + 1) / KEYS;
    last_tile = (min(kv_len, first_pos + Q_ROWS) - 1) / KEYS;
  }
  DEV bool is_empty() const { return q_row >= q_len; }  // padding of the list
  DEV int num_tiles() const { return last_tile - first_tile + 1; }
};

// Index of the block's item in round `round`, back and forth over the blocks.
DEV int item_index(int round) {
  return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

struct Params {
  scalar_t* out;            // [T, num_heads, HEAD_DIM]
  const int* block_table;   // [table rows, table_stride]
  const int* rows;          // [B] table row of each batch row
  const int4* work;         // [num_work or more] {batch row, first query row, q_len, kv_len}
  const int* q_start;       // [B] first token of each batch row
  int num_work, table_stride, num_heads, num_kv_heads;
  int window;               // keys that a query sees, itself included
  float scale_log2;         // log2(e) * scale, or log2(e) * softcap
  float scale_inner;        // SOFTCAP: 2 log2(e) * scale / softcap
  float v_scale;            // of the result
};

// One warp. Lane i fetches the i-th block of each tile; a block of one head is contiguous.
DEV void produce(const Params& p, const Smem& smem, const TensorMap* q_map, const TensorMap* k_map,
                 const TensorMap* v_map) {
  const int lane = threadIdx.x, num_items = p.num_work * p.num_heads;
  u32 tile = 0, item_count = 0;  // since the kernel began
  for (int round = 0; round * (int)gridDim.x < num_items; round++) {
    const int index = item_index(round);
    if (index >= num_items) continue;
    const Item item(p.work, index, p.num_heads, p.window);
    if (item.is_empty()) continue;
    const int kv_head = item.head / (p.num_heads / p.num_kv_heads);
    const int* table = p.block_table + (i64)p.rows[item.batch_row] * p.table_stride;
    const int last_block = (item.kv_len - 1) / BLOCK_SIZE;
    for (int j = item.last_tile; j >= item.first_tile; j--, tile++) {
      const u32 stage = tile % STAGES, parity = (tile / STAGES & 1) ^ 1;
      int y = 0;  // row of the cache, seen as a matrix; blocks beyond the last are masked: any will do
      if (lane < BLOCKS_PER_TILE)
        y = (table[min(j * BLOCKS_PER_TILE + lane, last_block)] * p.num_kv_heads + kv_head) * BLOCK_SIZE;

      mbarrier_wait(smem.k_empty(stage), parity);
      if (lane == 0) mbarrier_arrive_expect(smem.k_full(stage), KV_BYTES);
      __syncwarp();
      if (lane < BLOCKS_PER_TILE)
        for (int h = 0; h < HALVES; h++)
          tma_load_2d(smem.k_tile(stage) + h * KV_HALF + lane * BLOCK_SIZE * 128, k_map, smem.k_full(stage), h * 64, y);

      if (j == item.last_tile && lane == 0) {
        mbarrier_wait(smem.q_empty(), (item_count & 1) ^ 1);
        mbarrier_arrive_expect(smem.q_full(), Q_BYTES);
        const int token = p.q_start[item.batch_row] + item.q_row;
        for (int h = 0; h < HALVES; h++)
          tma_load_3d(smem.q + h * Q_HALF, q_map, smem.q_full(), h * 64, item.head, token);
      }
      __syncwarp();

      mbarrier_wait(smem.v_empty(stage), parity);
      if (lane == 0) mbarrier_arrive_expect(smem.v_full(stage), KV_BYTES);
      __syncwarp();
      if (lane < BLOCKS_PER_TILE)
        for (int h = 0; h < HALVES; h++)
          tma_load_2d(smem.v_tile(stage) + h * KV_HALF + lane * BLOCK_SIZE * 128, v_map, smem.v_full(stage), h * 64, y);
    }
    item_count++;
  }
}

DEV float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEV float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Rows of a V tile from `row` on become zero: 0 * (whatever lies beyond the sequence) must be 0.
DEV void zero_rows(u32 tile, int row, int thread) {
  for (int h = 0; h < HALVES; h++)
    for (int i = row * 8 + thread; i < KEYS * 8; i += 128)
      store_zeros_16(tile + h * KV_HALF + i * 16);
}

// What a thread knows of a row of scores.
struct Row {
  float limit = UNSEEN;  // that scores may reach without rescaling, in log2 units
  float shift = 0.f;     // of exponents
  float sum = 0.f;       // of the thread's exponentials

  // With `top` the thread's largest score: the factor of what has been summed up so far.
  DEV float raise(float top) {
    const float highest = quad_max(top);
    if (!(highest > limit)) return 1.f;
    const float factor = limit == UNSEEN ? 0.f : exp2_fast(shift - highest);
    shift = highest;
    limit = highest + GROWTH;
    return factor;
  }
};

// One warpgroup. Accumulators and fragments: see wgmma in common/sm90.cuh.
DEV void consume(const Params& p, const Smem& smem, int consumer) {
  const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int num_items = p.num_work * p.num_heads;
  const int row_in_item = consumer * 64 + warp * 16 + g;  // my rows: this one and the one 8 below
  const u32 q = smem.q + consumer * 64 * 128;
  const int my_turn = 1 + consumer, next_turn = 1 + (consumer + 1) % CONSUMERS, own_barrier = 1 + CONSUMERS + consumer;
  u32 tile = 0, item_count = 0;  // as the producer counts
  auto take_turn = [&] { named_barrier_sync(my_turn, 256); };
  auto pass_turn = [&] { named_barrier_arrive(next_turn, 256); };
  auto release = [&](u32 barrier) { if (lane == 0) mbarrier_arrive(barrier); };
  auto wait_keys = [&](u32 number) { mbarrier_wait(smem.k_full(number % STAGES), number / STAGES & 1); };
  auto wait_values = [&](u32 number) { mbarrier_wait(smem.v_full(number % STAGES), number / STAGES & 1); };

  if (consumer == CONSUMERS - 1) pass_turn();  // consumer 0 begins
  for (int round = 0; round * (int)gridDim.x < num_items; round++) {
    const int index = item_index(round);
    if (index >= num_items) continue;
    const Item item(p.work, index, p.num_heads, p.window);
    if (item.is_empty()) continue;

    float o[HEAD_DIM / 2], s[KEYS / 2];
    u32 fragments[KEYS / 16][4];  // P
    Row row0, row1;
    float factor0 = 1.f, factor1 = 1.f;  // of O
    bool is_raised = false;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) o[i] = 0.f;
    const int pos0 = item.first_pos + row_in_item, pos1 = pos0 + 8;
    const int lowest_pos = item.first_pos + consumer * 64, highest_pos = lowest_pos + 63;

    auto start_scores = [&](u32 stage) {
      const u32 k = smem.k_tile(stage);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 16; i++)
        wgmma_ss(s, descriptor_k_major(q + i / 4 * Q_HALF + i % 4 * 32), descriptor_k_major(k + i / 4 * KV_HALF + i % 4 * 32), i > 0);
      wgmma_commit();
    };
    auto start_output = [&](u32 stage) {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < KEYS / 16; i++)
        wgmma_rs(o, fragments[i], descriptor_mn_major(smem.v_tile(stage) + i * 2048, KV_HALF), 1);
      wgmma_commit();
    };
    auto exponentials = [&](int j) {  // s becomes exp2(s * scale - shift)
      wgmma_results(s);
#ifdef SOFTCAP
#pragma unroll
      for (int i = 0; i < KEYS / 2; i++) s[i] = 1.f - 2.f * reciprocal_fast(1.f + exp2_fast(s[i] * p.scale_inner));
#endif
      const int first_key = j * KEYS;
      if (first_key + KEYS - 1 > lowest_pos || first_key <= highest_pos - p.window) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
          const int key = first_key + i / 4 * 8 + t * 2 + (i & 1), pos = i & 2 ? pos1 : pos0;
          if (key > pos || key <= pos - p.window) s[i] = MASKED;
        }
      }
      float top[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
      for (int i = 4; i < KEYS / 2; i++) top[i % 4] = fmaxf(top[i % 4], s[i]);
      const float top0 = fmaxf(top[0], top[1]) * p.scale_log2, top1 = fmaxf(top[2], top[3]) * p.scale_log2;
      is_raised = __any_sync(~0u, top0 > row0.limit || top1 > row1.limit);
      if (is_raised) factor0 = row0.raise(top0), factor1 = row1.raise(top1);
#pragma unroll
      for (int i = 0; i < KEYS / 2; i++)
        s[i] = exp2_fast(s[i] * p.scale_log2 - (i & 2 ? row1.shift : row0.shift));
      wgmma_results(s);
    };
    auto sum_and_pack = [&] {
      float part[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
      for (int i = 4; i < KEYS / 2; i++) part[i % 4] += s[i];
      row0.sum += part[0] + part[1];
      row1.sum += part[2] + part[3];
#pragma unroll
      for (int i = 0; i < KEYS / 16; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) fragments[i][e] = pack2(s[8 * i + 2 * e], s[8 * i + 2 * e + 1]);
    };

    // Tiles of which none of my rows sees anything.
    const bool is_idle = item.q_row + consumer * 64 >= item.q_len;
    const int my_last_tile = is_idle ? item.first_tile - 1 : min(item.last_tile, highest_pos / KEYS);
    int j = item.last_tile;
    mbarrier_wait(smem.q_full(), item_count & 1);
    for (; j > my_last_tile; j--, tile++) {
      take_turn();
      pass_turn();
      wait_keys(tile);
      release(smem.k_empty(tile % STAGES));
      wait_values(tile);
      release(smem.v_empty(tile % STAGES));
    }
    if (is_idle) {
      release(smem.q_empty());
      item_count++;
      continue;
    }

    // The first tile has no product with V of an earlier one to start, and may reach beyond the sequence.
    wait_keys(tile);
    take_turn();
    start_scores(tile % STAGES);
    pass_turn();
    wgmma_wait<0>();
    release(smem.k_empty(tile % STAGES));
    if (j == item.first_tile) release(smem.q_empty());
    exponentials(j);
    wait_values(tile);
    if ((j + 1) * KEYS > item.kv_len) {  // all consumers write the same zeros
      zero_rows(smem.v_tile(tile % STAGES), item.kv_len - j * KEYS, thread);
      fence_async_proxy();
      named_barrier_sync(own_barrier, 128);
    }
    if (j > item.first_tile) wait_keys(tile + 1);
    sum_and_pack();

    for (j--, tile++; j >= item.first_tile; j--, tile++) {
      take_turn();
      start_scores(tile % STAGES);
      start_output((tile - 1) % STAGES);
      pass_turn();
      wgmma_wait<1>();
      release(smem.k_empty(tile % STAGES));
      if (j == item.first_tile) release(smem.q_empty());
      exponentials(j);
      wait_values(tile);
      if (j > item.first_tile) wait_keys(tile + 1);
      wgmma_wait<0>();
      wgmma_results(o);
      release(smem.v_empty((tile - 1) % STAGES));
      if (is_raised) {
        row0.sum *= factor0, row1.sum *= factor1;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) o[i] *= i & 2 ? factor1 : factor0;
      }
      sum_and_pack();
    }
    start_output((tile - 1) % STAGES);
    wgmma_wait<0>();
    wgmma_results(o);
    release(smem.v_empty((tile - 1) % STAGES));
    item_count++;

    const float inverse0 = p.v_scale / quad_sum(row0.sum), inverse1 = p.v_scale / quad_sum(row1.sum);
    const int q_row = item.q_row + row_in_item;
    const i64 row_stride = (i64)p.num_heads * HEAD_DIM;
    scalar_t* out = p.out + (p.q_start[item.batch_row] + q_row) * row_stride + item.head * HEAD_DIM;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n += 4) {  // 32 columns: after the exchange lane t has 8 t ... 8 t + 7
      u32 upper[4], lower[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* c = o + 4 * (n + i);
        upper[i] = pack2(c[0] * inverse0, c[1] * inverse0);
        lower[i] = pack2(c[2] * inverse1, c[3] * inverse1);
      }
      transpose_quad(upper, t);
      transpose_quad(lower, t);
      scalar_t* to = out + (n + t) * 8;
      if (q_row < item.q_len) *(uint4*)to = make_uint4(upper[0], upper[1], upper[2], upper[3]);
      if (q_row + 8 < item.q_len) *(uint4*)(to + 8 * row_stride) = make_uint4(lower[0], lower[1], lower[2], lower[3]);
    }
  }
  if (consumer == 0) take_turn();  // the last token, so that no barrier stays half full
}

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1) paged_prefill_sm90(
    const __grid_constant__ TensorMap q_map,  // [T, num_heads, HEAD_DIM], box [Q_ROWS, 1, 64]
    const __grid_constant__ TensorMap k_map,  // [blocks * num_kv_heads * BLOCK_SIZE, HEAD_DIM], box [BLOCK_SIZE, 64]
    const __grid_constant__ TensorMap v_map,
    scalar_t* __restrict__ out,
    // No `__restrict__` here: the kernel before this one may have written them (dependent_launch.cuh).
    const int* block_table, const int* rows, const int4* work, const int* q_start,
    const int* num_items,     // of `work` that count, or null: all
    int max_items, int table_stride,
    int num_heads, int num_kv_heads, int window, float scale_log2, float scale_inner, float v_scale)
{
  extern __shared__ u8 raw[];
  const Smem smem(raw);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0);  // uniform, as the compiler can see
  if (threadIdx.x == 0) {
    mbarrier_init(smem.q_full(), 1);
    mbarrier_init(smem.q_empty(), 4 * CONSUMERS);  // one arrival per consumer warp
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(smem.k_full(i), 1);
      mbarrier_init(smem.v_full(i), 1);
      mbarrier_init(smem.k_empty(i), 4 * CONSUMERS);
      mbarrier_init(smem.v_empty(i), 4 * CONSUMERS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  grid_dependency_wait();
  const int num_work = num_items == nullptr ? max_items : min(*num_items, max_items);
  const Params params{out, block_table, rows, work, q_start, num_work, table_stride,
                      num_heads, num_kv_heads, window, scale_log2, scale_inner, v_scale};
  if (warpgroup == 0) {
    registers_give<CONSUMERS == 3 ? 32 : 40>();
    if (threadIdx.x < 32) produce(params, smem, &q_map, &k_map, &v_map);
  } else {
    registers_take<CONSUMERS == 3 ? 160 : 232>();
    consume(params, smem, warpgroup - 1);
  }
}
