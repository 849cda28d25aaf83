// Which tokens each block attends to in a step of up to 8 rows, for the whole launch, and how a row's parts come
// together. An item is a row's part, a multiple of STEP tokens, the same for all, and a KV head with its GROUP
// query heads: block b has KV head b % NUM_KV_HEADS and part b / NUM_KV_HEADS of all rows'. There are as many parts as
// there are blocks for; the last block of a row to be done merges them. (That whoever needs the result merges parts
// while they come took longer: 132 blocks then read all of them.)
//
//   -DNUM_HEADS  -DNUM_KV_HEADS  -DHEAD_DIM  -DMAX_PARTS
#pragma once
#include "common/kv_tile.cuh"
#include "common/lamport.cuh"
#include "common/reduce.cuh"

constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;
constexpr int KV_WARPS = SYNC_THREADS / 32;
constexpr int TILE = 16;
constexpr int STEP = KV_WARPS * TILE;  // a tile for each warp

struct RowItem {
  int chunk;       // tokens of a part
  int row = -1;    // of the batch; -1: this block has none
  int begin, end;
  int part, num_parts;

  DEV static int index() { return blockIdx.x / NUM_KV_HEADS; }  // of the part among those of all rows
  DEV static int kv_head() { return blockIdx.x % NUM_KV_HEADS; }
  DEV int parts_of(int length) const { return max(1, (length + chunk - 1) / chunk); }

  // Rows of m. Needs m <= gridDim.x / NUM_KV_HEADS.
  static DEV RowItem choose(const int* seq_lens, int m) {
    const int most = (int)gridDim.x / NUM_KV_HEADS;
    int total = 0;
    for (int r = 0; r < m; r++) total += seq_lens[r];
    RowItem item;
    item.chunk = (total + most * STEP - 1) / (most * STEP) * STEP;
    while (true) {
      int count = 0;
      for (int r = 0; r < m; r++) count += item.parts_of(seq_lens[r]);
      if (count <= most) break;
      item.chunk += max(1, item.chunk / (8 * STEP)) * STEP;
    }
    int first = 0;
    for (int r = 0; r < m; r++) {
      const int parts = item.parts_of(seq_lens[r]);
      if (item.index() >= first && item.index() < first + parts) {
        item.row = r, item.part = item.index() - first, item.num_parts = parts;
        item.begin = item.part * item.chunk, item.end = min(item.begin + item.chunk, seq_lens[r]);
      }
      first += parts;
    }
    return item;
  }
  DEV bool has_newest() const { return part == num_parts - 1 && end > begin; }
};

// Where results of parts go.
struct PartOperands {
  scalar_t* out;             // [m, NUM_HEADS, HEAD_DIM], empty
  float *part_o, *part_lse;  // [items, NUM_HEADS, HEAD_DIM], [items, NUM_HEADS]: of rows with several parts
  u32* arrivals;             // [m, NUM_KV_HEADS], zero before and after
};

// What a row's attention has filled is empty again, whichever block has filled it: by one warp of that with its first part.
DEV void empty_parts(const RowItem& item, const PartOperands& op) {
  if (item.part > 0) return;
  const uint4 nothing = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
  for (int i = threadIdx.x & 31; i < GROUP * HEAD_DIM / 8; i += 32)
    store16_l2(op.out + (item.row * NUM_HEADS + item.kv_head() * GROUP) * HEAD_DIM + 8 * i, nothing);
}

// The last block to arrive puts a row's parts together. `weights`: [GROUP][MAX_PARTS] in shared memory, as
// is `is_last`.
DEV void merge_item(const RowItem& item, const PartOperands& op, float* weights, int* is_last) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first_head = item.kv_head() * GROUP;
  __threadfence();
  sync_part();
  if (threadIdx.x == 0) {
    u32* counter = op.arrivals + item.row * NUM_KV_HEADS + item.kv_head();
    *is_last = atomicInc(counter, item.num_parts - 1) == (u32)item.num_parts - 1;
  }
  sync_part();
  if (!*is_last) return;
  __threadfence();
  const i64 first_item = item.index() - item.part;
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
