// Which tokens each block attends to in a step of up to 8 rows, for the whole launch, and how a row's parts come
// together. An item is a row's part, a multiple of STEP tokens, the same for all, and a KV head with its GROUP
// query heads: block b has KV head b % NUM_KV_HEADS and part b / NUM_KV_HEADS of all rows'.
//
//   few    no more parts than a tile of 8 rows has room for, each row the same number: every block that needs the
//          result merges them, lane 4 g + t part g, and nobody waits for a block that would
//   many   long contexts: as many parts as there are blocks for; the last block of a row to be done merges them
//
//   -DNUM_HEADS  -DNUM_KV_HEADS  -DHEAD_DIM  -DMAX_PARTS
//   -DFEW_PARTS=n   of all rows, a power of two up to 8   -DFEW_STEPS=n   of STEP tokens in each, at most
#pragma once
#include "common/kv_tile.cuh"
#include "common/lamport.cuh"
#include "common/reduce.cuh"

constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;
constexpr int KV_WARPS = SYNC_THREADS / 32;
constexpr int TILE = 16;
constexpr int STEP = KV_WARPS * TILE;  // a tile for each warp

struct RowItem {
  bool few;
  int per_row;     // if few, room for parts of a row: a power of two
  int chunk;       // tokens of a part
  int row = -1;    // of the batch; -1: this block has none
  int kv_head, begin, end;
  int index;       // of the part among those of all rows
  int part, num_parts;

  DEV int parts_of(int length) const { return max(1, (length + chunk - 1) / chunk); }

  // Rows of m. Needs m <= gridDim.x / NUM_KV_HEADS.
  static DEV RowItem choose(const int* seq_lens, int m) {
    const int most = (int)gridDim.x / NUM_KV_HEADS;
    int total = 0, longest = 1;
    for (int r = 0; r < m; r++) total += seq_lens[r], longest = max(longest, seq_lens[r]);
    RowItem item;
    item.index = blockIdx.x / NUM_KV_HEADS, item.kv_head = blockIdx.x % NUM_KV_HEADS;
    item.per_row = FEW_PARTS;
    while (item.per_row > 1 && item.per_row * m > min(FEW_PARTS, most)) item.per_row /= 2;
    item.chunk = (longest + item.per_row * STEP - 1) / (item.per_row * STEP) * STEP;
    item.few = item.chunk <= FEW_STEPS * STEP && item.per_row * m <= FEW_PARTS;
    if (!item.few) item.chunk = (total + most * STEP - 1) / (most * STEP) * STEP;
    while (!item.few) {
      int count = 0;
      for (int r = 0; r < m; r++) count += item.parts_of(seq_lens[r]);
      if (count <= most) break;
      item.chunk += max(1, item.chunk / (8 * STEP)) * STEP;
    }
    int first = 0;
    for (int r = 0; r < m; r++) {
      const int parts = item.parts_of(seq_lens[r]);
      if (item.index >= first && item.index < first + parts) {
        item.row = r, item.part = item.index - first, item.num_parts = parts;
        item.begin = item.part * item.chunk, item.end = min(item.begin + item.chunk, seq_lens[r]);
      }
      first += item.few ? item.per_row : parts;
    }
    return item;
  }
  DEV bool has_newest() const { return part == num_parts - 1 && end > begin; }
};

// Where results of parts go.
struct PartOperands {
  scalar_t* out;             // [m, NUM_HEADS, HEAD_DIM], if many; empty
  float *few_o, *few_lse;    // [FEW_PARTS, NUM_HEADS, HEAD_DIM], [NUM_HEADS, FEW_PARTS], if few; empty
  float *part_o, *part_lse;  // [items, ..] likewise, if many
  u32* arrivals;             // [m, NUM_KV_HEADS], zero before and after
};

// What this block's item has filled is empty again. By one warp.
DEV void empty_parts(const RowItem& item, const PartOperands& op) {
  const int lane = threadIdx.x & 31, first_head = item.kv_head * GROUP;
  const uint4 nothing = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
  if (item.few) {
    float* o = op.few_o + (item.index * NUM_HEADS + first_head) * HEAD_DIM;
    for (int i = lane; i < GROUP * HEAD_DIM / 4; i += 32) store16_l2(o + 4 * i, nothing);
    if (lane < GROUP) store4_l2(op.few_lse + (first_head + lane) * FEW_PARTS + item.index, EMPTY);
  } else if (item.part == 0) {  // of the row, whoever has filled it
    for (int i = lane; i < GROUP * HEAD_DIM / 8; i += 32)
      store16_l2(op.out + (item.row * NUM_HEADS + first_head) * HEAD_DIM + 8 * i, nothing);
  }
}

// If few: what attention makes of row g of m, put together from its parts while they come; the 8 columns from 8 t on of
// each half of the chunks of 64 columns warp, warp + KV_WARPS, ... By whole warps. `has_part`: whether there is
// a part g % per_row of row g / per_row.
template <int CHUNKS, int X_CHUNKS>
DEV void load_few_parts(uint4 (&x)[X_CHUNKS][2], const RowItem& item, bool has_part, const PartOperands& op, int m) {
  constexpr int AT_ONCE = X_CHUNKS < 4 ? X_CHUNKS : 4;  // chunks whose parts are in registers
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  Patience patience;
#pragma unroll
  for (int first = 0; first < X_CHUNKS; first += AT_ONCE) {
    u32 lse[AT_ONCE], awaited = 0;
    bool wanted[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      wanted[i] = has_part && first + i < X_CHUNKS && warp + KV_WARPS * (first + i) < CHUNKS;
      lse[i] = __float_as_uint(NO_MAXIMUM);
      if (wanted[i]) awaited |= 1u << i;
    }
    // These come last, as a rule: until then nothing else is looked at.
    while (awaited != 0) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (awaited >> i & 1)
          lse[i] = load4_l2(op.few_lse + (warp + KV_WARPS * (first + i)) * 64 / HEAD_DIM * FEW_PARTS + g);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (lse[i] != EMPTY) awaited &= ~(1u << i);
      if (awaited != 0) patience.look_again();
    }
    const float* mine = op.few_o + g * (NUM_HEADS * HEAD_DIM) + (warp + KV_WARPS * first) * 64 + t * 8;
    uint4 part[AT_ONCE][2][2];
    u32 missing = 0;
#pragma unroll
    for (int j = 0; j < 4 * AT_ONCE; j++) {
      part[j / 4][j / 2 % 2][j % 2] = make_uint4(0, 0, 0, 0);
      if (wanted[j / 4]) missing |= 1u << j;
    }
    while (missing != 0) {
#pragma unroll
      for (int j = 0; j < 4 * AT_ONCE; j++)
        if (missing >> j & 1)
          part[j / 4][j / 2 % 2][j % 2] = load16_l2(mine + j / 4 * (KV_WARPS * 64) + j / 2 % 2 * 32 + j % 2 * 4);
#pragma unroll
      for (int j = 0; j < 4 * AT_ONCE; j++)
        if (!has_empty(part[j / 4][j / 2 % 2][j % 2])) missing &= ~(1u << j);
      if (missing != 0) patience.look_again();
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (first + i >= X_CHUNKS) continue;
      float top = __uint_as_float(lse[i]);
      for (int step = 1; step < item.per_row; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, 4 * step));
      float w = wanted[i] ? exp2_fast(__uint_as_float(lse[i]) - top) : 0.f, sum = w;
      for (int step = 1; step < item.per_row; step *= 2) sum += __shfl_xor_sync(~0u, sum, 4 * step);
      w = sum > 0.f ? w / sum : 0.f;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float y[8];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const uint4 v = part[i][half][j];
          y[4 * j] = w * __uint_as_float(v.x), y[4 * j + 1] = w * __uint_as_float(v.y);
          y[4 * j + 2] = w * __uint_as_float(v.z), y[4 * j + 3] = w * __uint_as_float(v.w);
        }
        for (int step = 1; step < item.per_row; step *= 2)
#pragma unroll
          for (int e = 0; e < 8; e++) y[e] += __shfl_xor_sync(~0u, y[e], 4 * step);
        // Row g's sums are with the lanes of its parts.
        const int from = 4 * min(g * item.per_row, FEW_PARTS - 1) + t;
        u32 words[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          words[e] = __shfl_sync(~0u, pack2(y[2 * e], y[2 * e + 1]), from);
          if (g >= m) words[e] = 0;
        }
        x[first + i][half] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// If many: the last block to arrive puts a row's parts together. `weights`: [GROUP][MAX_PARTS] in shared memory, as
// is `is_last`.
DEV void merge_item(const RowItem& item, const PartOperands& op, float* weights, int* is_last) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first_head = item.kv_head * GROUP;
  __threadfence();
  sync_part();
  if (threadIdx.x == 0) {
    u32* counter = op.arrivals + item.row * NUM_KV_HEADS + item.kv_head;
    *is_last = atomicInc(counter, item.num_parts - 1) == (u32)item.num_parts - 1;
  }
  sync_part();
  if (!*is_last) return;
  __threadfence();
  const i64 first_item = item.index - item.part;
  const float* lse = op.part_lse + first_item * NUM_HEADS + first_head;
  for (int row = warp; row < GROUP; row += KV_WARPS) {
    float top = NO_MAXIMUM, sum = 0.f;
    for (int i = lane; i < item.num_parts; i += 32) top = fmaxf(top, load_float_l2(lse + i * NUM_HEADS + row));
    top = warp_max(top);
    for (int i = lane; i < item.num_parts; i += 32) {
      const float weight = exp2_fast(load_float_l2(lse + i * NUM_HEADS + row) - top);
      weights[row * MAX_PARTS + i] = weight;
      sum += weight;
    }
    sum = warp_sum(sum);
    for (int i = lane; i < item.num_parts; i += 32) weights[row * MAX_PARTS + i] /= sum;
  }
  sync_part();
  constexpr int QUADS = HEAD_DIM / 4;
  for (int i = threadIdx.x; i < GROUP * QUADS; i += SYNC_THREADS) {
    const int row = i / QUADS, column = i % QUADS * 4, head = first_head + row;
    const float* from = op.part_o + (first_item * NUM_HEADS + head) * HEAD_DIM + column;
    const Float4 sum = merge_parts(from, weights + row * MAX_PARTS, item.num_parts, NUM_HEADS * HEAD_DIM);
    store8_l2(op.out + (item.row * NUM_HEADS + head) * HEAD_DIM + column, pack2(sum.x, sum.y), pack2(sum.z, sum.w));
  }
}
