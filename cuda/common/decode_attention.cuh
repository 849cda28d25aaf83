// Attention of up to 8 rows of one query each, as a part of a kernel whose blocks hand each other vectors while they
// run (lamport.cuh). As in paged_decode.cu with FUSED_ROPE, but each block has one item (decode_parts.cuh).
//
// A tile of 16 tokens is one warp's. The first KV_STAGES tiles of each warp are fetched before the wait for the
// product that makes queries, keys and values.
//
//   -DHEAD_DIM (up to 128)  -DBLOCK_SIZE (a multiple of 16)  -DNUM_HEADS  -DNUM_KV_HEADS  -DKV_STAGES  -DMAX_PARTS
#pragma once
#include "common/kv_tile.cuh"
#include "common/decode_parts.cuh"
#include "common/rotation.cuh"

constexpr int TILE_BYTES = TILE * KvLayout::STRIDE;
constexpr int STAGE_BYTES = 2 * TILE_BYTES;  // keys, then values
constexpr int O_STRIDE = HEAD_DIM + 8;       // floats between rows of O: no bank conflicts
static_assert(GROUP <= 16, "the query heads of a KV head are the rows of one tile");
static_assert(BLOCK_SIZE % TILE == 0, "a tile must not straddle blocks of the cache");

// Shared memory, in bytes: tiles, or the warps' sums in their place; rotated queries; newest key and value; the rest.
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int O_BYTES = KV_WARPS * GROUP * O_STRIDE * 4;
constexpr int ROTATED_AT = (larger(KV_WARPS * KV_STAGES * STAGE_BYTES, O_BYTES) + 127) / 128 * 128;
constexpr int NEWEST_AT = ROTATED_AT + TILE * QueryLayout::STRIDE;
constexpr int MAXIMA_AT = NEWEST_AT + 2 * HEAD_DIM * 2;      // [KV_WARPS][GROUP] floats, then denominators
constexpr int WEIGHTS_AT = MAXIMA_AT + 2 * KV_WARPS * GROUP * 4;  // [GROUP][MAX_PARTS] floats
constexpr int FLAG_AT = WEIGHTS_AT + GROUP * MAX_PARTS * 4;
constexpr int ATTENTION_BYTES = FLAG_AT + 16;

struct AttentionOperands {
  const scalar_t* qkv;       // [m, NUM_HEADS + 2 * NUM_KV_HEADS heads]: not rotated; other blocks fill it
  scalar_t *k_cache, *v_cache;
  const scalar_t* qk_norm;   // [NUM_HEADS + NUM_KV_HEADS, HEAD_DIM], or null
  const int* table_row;      // of the item's row
  int first_block, newest_block;  // of the cache: of a warp's first tile; of the newest token if the item has it
  const float *cos, *sin;
  int angles_at;             // of the item's row
  PartOperands parts;
  float scale;               // of scores, times log2(e)
  float eps;
};

struct alignas(16) KvChunk { u32 words[4]; };

// Once it has come.
DEV HeadPart wait_for_head(const scalar_t* p) {
  HeadPart x;
  uint4 first, second;
  Patience patience;
  while (true) {
    first = load16_l2(p), second = load16_l2(p + HALF);
    if (!has_gap(first) && !has_gap(second)) break;
    patience.look_again();
  }
  unpack16(first, x.a);
  unpack16(second, x.b);
  return x;
}

// The item's first tiles, as many as are fetched at once, into L2: by one warp, long before `attend`.
DEV void prefetch_tiles(const RowItem& item, const int* table_row, const scalar_t* k_cache, const scalar_t* v_cache) {
  const int tiles = min(KV_WARPS * KV_STAGES, (item.end - item.begin + TILE - 1) / TILE);
  for (int i = threadIdx.x & 31; i < tiles; i += 32) {
    const int token = item.begin + i * TILE;
    const i64 block = table_row[token / BLOCK_SIZE];
    const i64 start = ((block * NUM_KV_HEADS + item.kv_head()) * BLOCK_SIZE + token % BLOCK_SIZE) * HEAD_DIM;
    prefetch_l2(k_cache + start, TILE * KV_ROW_BYTES);
    prefetch_l2(v_cache + start, TILE * KV_ROW_BYTES);
  }
}

// `area`: ATTENTION_BYTES of shared memory at a multiple of 128, which nobody uses, and will not when this returns.
DEV void attend(const RowItem& item, const AttentionOperands& op, Stopwatch& watch, u8* area) {
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int first_head = item.kv_head() * GROUP;
  const bool has_newest = item.has_newest();
  const int num_visible = item.end - item.begin, num_cached = num_visible - has_newest, newest = item.end - 1;
  const int num_tiles = (num_visible + TILE - 1) / TILE, my_tiles = (num_tiles - warp + KV_WARPS - 1) / KV_WARPS;
  const smem_t ring = smem_address(area) + warp * (KV_STAGES * STAGE_BYTES);

  auto load_tile = [&](int i) {
    if (i < my_tiles) {
      const int place = (warp + i * KV_WARPS) * TILE, token = item.begin + place;  // of the item, of the row
      const i64 block = i == 0 ? op.first_block : op.table_row[token / BLOCK_SIZE];
      const i64 start = ((block * NUM_KV_HEADS + item.kv_head()) * BLOCK_SIZE + token % BLOCK_SIZE) * KV_ROW_BYTES;
      const u8 *keys = (const u8*)op.k_cache + start, *values = (const u8*)op.v_cache + start;
      const smem_t to = ring + i % KV_STAGES * STAGE_BYTES;
#pragma unroll
      for (int j = 0; j < TILE * KvLayout::CHUNKS / 32; j++) {
        const int c = j * 32 + lane, row = c / KvLayout::CHUNKS;
        // Others become zeros, whatever lies there: a weight of zero times NaN would be NaN.
        const bool wanted = place + row < num_cached;
        const u32 offset = KvLayout::offset(row, c % KvLayout::CHUNKS);
        copy_async_16(to + offset, keys + c * 16, wanted);
        copy_async_16(to + TILE_BYTES + offset, values + c * 16, wanted);
      }
    }
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < KV_STAGES; i++) load_tile(i);
  const int head_lane = thread % HEAD_LANES, element = head_lane * 8;
  Angles angles = {};
  if (head_lane < BUSY_LANES) angles = load_angles(op.cos, op.sin, op.angles_at + element);

  // The heads of q, then the newest key and value, HEAD_LANES threads each; whole warps go on.
  static_assert((TILE + 2) * HEAD_LANES <= SYNC_THREADS);
  const int num_new = GROUP + (has_newest ? 2 : 0), i = thread / HEAD_LANES;
  const bool active = i < num_new && head_lane < BUSY_LANES, is_value = i == GROUP + 1;
  const int head = i < GROUP ? first_head + i : NUM_HEADS + (i - GROUP) * NUM_KV_HEADS + item.kv_head();
  StoredPart gains = {};
  if (op.qk_norm != nullptr && active && !is_value) gains = load_stored(op.qk_norm + head * HEAD_DIM + element);
  watch.stamp();
  if (warp * 32 < num_new * HEAD_LANES) {
    HeadPart x = {};
    if (active) x = wait_for_head(op.qkv + (item.row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM + element);
    __syncwarp();
    if (op.qk_norm != nullptr) {
      const float factor = norm_factor(x, op.eps);
      if (!is_value) apply_norm(x, factor, unpack_head(gains));
    }
    if (!is_value) rotate(x, angles);
    if (active && i < GROUP) {
      u8* rows = area + ROTATED_AT;
      store8((scalar_t*)(rows + QueryLayout::offset(i, element / 8)), x.a);
      store8((scalar_t*)(rows + QueryLayout::offset(i, (element + HALF) / 8)), x.b);
    } else if (active) {
      store_kv((kv_t*)(area + NEWEST_AT) + (i - GROUP) * HEAD_DIM + element, x, 1.f);
      const i64 start =
          (((i64)op.newest_block * NUM_KV_HEADS + item.kv_head()) * BLOCK_SIZE + newest % BLOCK_SIZE) * HEAD_DIM + element;
      store_kv((is_value ? op.v_cache : op.k_cache) + start, x, 1.f);
    }
  }
  sync_part();
  watch.stamp();

  u32 query[K_STEPS][4];  // fragments by k step, the same in every warp
#pragma unroll
  for (int k = 0; k < K_STEPS; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = g + i % 2 * 8, column = query_column(k, t, i / 2);
      const u8* from = area + ROTATED_AT + QueryLayout::offset(row, column / 8) + column % 8 * 2;
      query[k][i] = row < GROUP ? *(const u32*)from : 0u;
    }

  float o[N_TILES][4] = {};
  float m[2] = {NO_MAXIMUM, NO_MAXIMUM}, l[2] = {0.f, 0.f};  // of rows g and g + 8
  for (int i = 0; i < my_tiles; i++) {
    copy_async_wait<KV_STAGES - 1>();
    __syncwarp();
    const int stage = i % KV_STAGES * STAGE_BYTES;
    if (has_newest && warp + i * KV_WARPS == num_tiles - 1) {
      u8* tile = area + warp * (KV_STAGES * STAGE_BYTES) + stage;
      const KvChunk* from = (const KvChunk*)(area + NEWEST_AT);
      for (int j = lane; j < 2 * KvLayout::CHUNKS; j += 32) {
        const u32 offset = KvLayout::offset(newest % TILE, j % KvLayout::CHUNKS);
        *(KvChunk*)(tile + j / KvLayout::CHUNKS * TILE_BYTES + offset) = from[j];
      }
      __syncwarp();
    }
    const smem_t keys = ring + stage + KvLayout::lane_offset(lane), values = keys + TILE_BYTES;
    float s[2][4] = {};
#pragma unroll
    for (int load = 0; load < LOADS; load++) {
      KeyFragment f;
      f.load(keys, load);
      f.multiply(0, s[0], s[1], query[load]);
    }
    const int place = (warp + i * KV_WARPS) * TILE;
    float highest[2] = {HIDDEN, HIDDEN}, factor[2];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (place + n * 8 + t * 2 + e % 2 >= num_visible) s[n][e] = HIDDEN;
        highest[e / 2] = fmaxf(highest[e / 2], s[n][e]);
      }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      highest[h] = warp_max<4>(highest[h]);
      factor[h] = raise_maximum(m[h], highest[h] * op.scale);
      l[h] *= factor[h];
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[n][e] = exp2_fast(s[n][e] * op.scale - m[e / 2]);
        l[e / 2] += s[n][e];
      }
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) o[n][e] *= factor[e / 2];
    const u32 weights[4] = {pack_operand(s[0][0], s[0][1]), pack_operand(s[0][2], s[0][3]),
                            pack_operand(s[1][0], s[1][1]), pack_operand(s[1][2], s[1][3])};
#pragma unroll
    for (int load = 0; load < LOADS; load++) {
      ValueFragment f;
      f.load(values, load);
      f.multiply(0, o[2 * load], weights);
      f.multiply(1, o[2 * load + 1], weights);
    }
    __syncwarp();
    load_tile(i + KV_STAGES);
  }
  watch.stamp();

  // The warps' sums, in shared memory in place of the tiles.
  copy_async_wait<0>();
  sync_part();
  float* sums = (float*)area;                           // [KV_WARPS][GROUP][O_STRIDE]
  float* maxima = (float*)(area + MAXIMA_AT);           // [KV_WARPS][GROUP]
  float* denominators = maxima + KV_WARPS * GROUP;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    l[h] = warp_sum<4>(l[h]);
    if (g + 8 * h >= GROUP) continue;
    const int row = warp * GROUP + g + 8 * h;
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      float* to = sums + row * O_STRIDE + 8 * n + 2 * t;
      to[0] = o[n][2 * h], to[1] = o[n][2 * h + 1];
    }
    if (t == 0) maxima[row] = m[h], denominators[row] = l[h];
  }
  sync_part();
  watch.stamp();
  constexpr int QUADS = HEAD_DIM / 4;
  for (int i = thread; i < GROUP * QUADS; i += SYNC_THREADS) {
    const int row = i / QUADS, column = i % QUADS * 4, head = first_head + row;
    float top = maxima[row], denominator = 0.f;
#pragma unroll
    for (int w = 1; w < KV_WARPS; w++) top = fmaxf(top, maxima[w * GROUP + row]);
    Float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < KV_WARPS; w++) {
      const float weight = exp2_fast(maxima[w * GROUP + row] - top);
      const Float4 part = *(const Float4*)(sums + (w * GROUP + row) * O_STRIDE + column);
      denominator += weight * denominators[w * GROUP + row];
      sum.x += weight * part.x, sum.y += weight * part.y, sum.z += weight * part.z, sum.w += weight * part.w;
    }
    const float unit = denominator > 0.f ? 1.f / denominator : 0.f;  // no token: zeros
    sum = Float4{sum.x * unit, sum.y * unit, sum.z * unit, sum.w * unit};
    if (item.num_parts > 1) {
      const i64 place = (i64)item.index() * NUM_HEADS + head;
      const float lse = denominator > 0.f ? top + log2_fast(denominator) : NO_MAXIMUM;
      store16_l2(op.parts.part_o + place * HEAD_DIM + column,
                 make_uint4(__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z), __float_as_uint(sum.w)));
      if (column == 0) store4_l2(op.parts.part_lse + place, __float_as_uint(lse));
    } else {
      store8_l2(op.parts.out + (item.row * NUM_HEADS + head) * HEAD_DIM + column, pack2(sum.x, sum.y), pack2(sum.z, sum.w));
    }
  }
  if (item.num_parts > 1) merge_item(item, op.parts, (float*)(area + WEIGHTS_AT), (int*)(area + FLAG_AT));
  watch.stamp();
  sync_part();
}
