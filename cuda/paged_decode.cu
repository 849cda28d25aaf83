// Attention of one query per row over paged keys and values, in split parts: see
// engine/ops/paged_decode.py for the contract and the choice of the macros.
//
//   -DHEAD_DIM -DBLOCK_SIZE (a multiple of 16) -DGROUP (query heads per KV head)
//   -DNUM_WARPS -DSTAGES -DBLOCKS_PER_SM  -DSCALAR_... and of kv_tile.cuh: -DKV_... -DSOFTCAP
//   -DFUSED_ROPE=0 | 1   1: q, k and v come as the product made them; -DROPE_FP32 (rotation.cuh)
//
// Bound by memory: what counts is bytes in flight. A thread block takes a work item (a row's tokens
// begin .. end - 1) and one KV head with its GROUP query heads; more than 16 take several blocks. Block y takes
// item y, then others, there and back along the list, which begins with the long ones. All blocks of a launch run
// at a time: the next kernel may start early only when none is left to begin.
//
//   tile (16 tokens)   0  1  2  3  4  5  6  7  8 ...
//   warp               0  1  2  3  0  1  2  3  0 ...     each warp with a ring of STAGES tiles of its own,
//                                                        filled by cp.async: no barrier in the loop
//
// Keys stand on the left of the tensor cores' products, S^T = K Q^T and O^T = V^T P^T: tiles of 16 tokens or
// columns by 8 query heads, where heads on the left would mostly leave 8 or more of 16 rows empty.
//
// The warps' softmax sums meet in shared memory at the end, while the next item's first tiles are on their way
// (common/tile_ring.cuh). Of a row that is split into several items, each leaves its part in global memory, and
// the block that finds all others' parts there merges them.
//
// With FUSED_ROPE the block norms and rotates its query heads itself, on their way to shared memory. The item
// with a row's newest token, its last, does so with that token's key, too, writes key and value to the cache,
// and puts them into their row of the tile. So nothing but qkv is read of the kernel in front, and the first
// tiles of the cache are on their way while that one still runs.
#include "common/dependent_launch.cuh"
#include "common/dtype.cuh"
#include "common/async_copy.cuh"
#include "common/mma.cuh"
#include "common/kv_tile.cuh"
#include "common/row_parts.cuh"
#include "common/tile_ring.cuh"
#include "common/work_item.cuh"
#if FUSED_ROPE
#include "common/rotation.cuh"
#endif

constexpr int THREADS = NUM_WARPS * 32;
constexpr int ROW_BLOCKS = (GROUP + 15) / 16;
constexpr int HEAD_TILES = GROUP > 8 ? 2 : 1, MAX_HEADS = 8 * HEAD_TILES;  // of a block
constexpr int SUM_STRIDE = HEAD_DIM + 4;  // floats between heads' O: no bank conflicts
constexpr int WARP_SUMS = NUM_WARPS * MAX_HEADS * SUM_STRIDE, PART_WEIGHTS = MAX_HEADS * MAX_PARTS;
constexpr int SUMS = WARP_SUMS > PART_WEIGHTS ? WARP_SUMS : PART_WEIGHTS;  // floats: first the one, then the other

// The warps' sums take the place of tiles, in the first slots of the rings. The next item's first tiles go to the
// others meanwhile.
constexpr int SUM_SLOTS = ((SUMS + 2 * NUM_WARPS * MAX_HEADS) * 4 + 16 + SLOT_BYTES - 1) / SLOT_BYTES;
constexpr int EARLY_TILES = STAGES > SUM_SLOTS ? STAGES - SUM_SLOTS : 0;
typedef TileRing<SUM_SLOTS> Tiles;

constexpr bool QUERY_IN_SMEM = HEAD_DIM > 128;  // registers would not hold it beside O

// Shared memory: rings of tiles, the queries' fragments if QUERY_IN_SMEM, and if FUSED_ROPE rotated queries and
// the newest key and value as the cache has them.
constexpr int FRAGMENTS_AT = STAGES * SLOT_BYTES;  // [K_STEPS][HEAD_TILES][32]
constexpr int ROTATED_AT = FRAGMENTS_AT + (QUERY_IN_SMEM ? K_STEPS * 32 * HEAD_TILES * 8 : 0);
constexpr int NEWEST_AT = ROTATED_AT + MAX_HEADS * QueryLayout::STRIDE;

// The same number, but the compiler does not know that it is the same for every item: it would keep what follows
// from it (places in shared memory) from item to item, in up to a third more registers.
DEV u32 made_anew(u32 x) {
#ifndef SLUICE_EMULATE
  asm volatile("" : "+r"(x));
#endif
  return x;
}

struct alignas(8) Fragment { u32 b[2]; };  // 16 columns of 8 queries, as a right operand
struct alignas(16) Chunk { u32 words[4]; };

// Does the item's last token come from the kernel before, and not from the cache?
DEV bool reads_newest(const WorkItem& item) {
  return FUSED_ROPE && item.end > item.begin &&
         (item.part < 0 || item.part == item.first_part + item.num_parts - 1);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) paged_decode(
    scalar_t* __restrict__ out,          // [rows, num_heads, HEAD_DIM]
    float* __restrict__ part_o,          // [parts, num_heads, HEAD_DIM]
    float* __restrict__ part_lse,        // [parts, num_heads]
    u32* __restrict__ arrivals,          // [splits, gridDim.x], zero before and after
    const scalar_t* q,      // [rows, num_heads or, if FUSED_ROPE, all heads of q, k and v, HEAD_DIM],
                            // rows q_stride apart
    kv_t* k_cache,          // [blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    kv_t* v_cache,
    const int* __restrict__ block_table, // [table rows, table_stride]
    const WorkItem* __restrict__ work,   // [*num_work or more]
    const int* __restrict__ num_work,
    long long q_stride, int table_stride, int num_kv_heads, float scale, float cap, float v_scale
#if FUSED_ROPE
    ,
    const angle_t* __restrict__ cos,  // [rows, >= HEAD_DIM / 2], angle_stride elements from row to row
    const angle_t* __restrict__ sin,
    const scalar_t* __restrict__ qk_norm,  // [num_heads + num_kv_heads, HEAD_DIM], or null
    long long angle_stride, float eps, float inverse_k_scale, float inverse_v_scale
#endif
    )
{
  extern __shared__ __align__(128) u8 smem[];
  scale *= KV_UNIT;
  v_scale *= KV_UNIT;
  bool has_waited = false;
  auto wait_once = [&] {
    if (!has_waited) {
      grid_dependency_wait();
      grid_dependency_launch();
    }
    has_waited = true;
  };
  const int kv_head = blockIdx.x / ROW_BLOCKS;
  const int first_head = kv_head * GROUP + blockIdx.x % ROW_BLOCKS * 16;  // of this block's query heads
  const int heads = min(16, (kv_head + 1) * GROUP - first_head);
  const int num_heads = num_kv_heads * GROUP;

  // Plans, block tables and angles are older than the kernel before this one.
  const int count = *num_work;
  WorkItem item = work[blockIdx.y], next;
  Tiles tiles;
  tiles.k_cache = (const u8*)k_cache, tiles.v_cache = (const u8*)v_cache;
  tiles.num_kv_heads = num_kv_heads, tiles.kv_head = kv_head;
  int advance = 2 * (gridDim.y - blockIdx.y) - 1;
  // The barrier: nobody reads shared memory any more, which the next item fills.
  for (int index = blockIdx.y; index < count;
       index += advance, advance = 2 * gridDim.y - advance, item = next, __syncthreads()) {
    const u32 thread = made_anew(threadIdx.x);
    const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const u32 num_visible = item.end - item.begin;

    const bool is_first = index == blockIdx.y;
    if (is_first) tiles.begin_item(item, reads_newest(item), block_table, table_stride, warp, lane);
#if FUSED_ROPE
    const bool has_newest = reads_newest(item);
    const int head_lane = thread % HEAD_LANES, element = head_lane * 8;  // of a head, as in rotation.cuh
    Angles angles = {};
    if (head_lane < BUSY_LANES) angles = load_angles(cos, sin, item.row * angle_stride + element);
    const int newest = item.end - 1;
    const long long newest_block = has_newest ? tiles.table_row[newest / BLOCK_SIZE] : 0;

    // The block's heads of q, then the newest key and value, HEAD_LANES threads each; whole warps go on.
    const int num_new = heads + (has_newest ? 2 : 0);
    auto head_of = [&](int i) { return i < heads ? first_head + i : num_heads + (i - heads) * num_kv_heads + kv_head; };
    auto load_gains = [&](int i) -> StoredPart {
      if (qk_norm == nullptr || i >= num_new || i == heads + 1 || head_lane >= BUSY_LANES) return {};
      return load_stored(qk_norm + head_of(i) * HEAD_DIM + element);
    };
    StoredPart gains = load_gains(thread / HEAD_LANES);
    #pragma unroll
    for (int i = 0; i < STAGES; i++)
      if (i >= EARLY_TILES || is_first) tiles.load(i, smem, warp, lane);
    wait_once();

    for (int first = warp * 32; first < num_new * HEAD_LANES; first += THREADS) {
      const int i = (first + lane) / HEAD_LANES;
      const bool active = i < num_new && head_lane < BUSY_LANES, is_value = i == heads + 1;
      HeadPart x = {};
      if (active) x = load_head(q + item.row * q_stride + head_of(i) * HEAD_DIM + element);
      if (qk_norm != nullptr) {
        if (first != warp * 32) gains = load_gains(i);
        const float factor = norm_factor(x, eps);
        if (!is_value) apply_norm(x, factor, unpack_head(gains));
      }
      if (!is_value) rotate(x, angles);
      if (active && i < heads) {
        u8* rows = smem + ROTATED_AT;
        store8((scalar_t*)(rows + QueryLayout::offset(i, element / 8)), x.a);
        store8((scalar_t*)(rows + QueryLayout::offset(i, (element + HALF) / 8)), x.b);
      } else if (active) {
        const float inverse_scale = is_value ? inverse_v_scale : inverse_k_scale;
        store_kv((kv_t*)(smem + NEWEST_AT) + (i - heads) * HEAD_DIM + element, x, inverse_scale);
        const long long start =
            ((newest_block * num_kv_heads + kv_head) * BLOCK_SIZE + newest % BLOCK_SIZE) * HEAD_DIM + element;
        if (blockIdx.x % ROW_BLOCKS == 0) store_kv((is_value ? v_cache : k_cache) + start, x, inverse_scale);
      }
    }
    __syncthreads();
#else
    // ... which wrote q and the newest token, which can only be an item's last.
    #pragma unroll
    for (int i = 0; i < STAGES; i++) {
      if (warp + i * NUM_WARPS >= tiles.count - 1) wait_once();
      if (i >= EARLY_TILES || is_first) tiles.load(i, smem, warp, lane);
    }
    wait_once();
#endif

    auto load_query = [&](int k, Fragment (&f)[HEAD_TILES]) {
      #pragma unroll
      for (int i = 0; i < 2 * HEAD_TILES; i++) {
        const int row = g + i / 2 * 8, column = query_column(k, t, i % 2);
#if FUSED_ROPE
        const u8* from = smem + ROTATED_AT + QueryLayout::offset(row, column / 8) + column % 8 * 2;
#else
        const scalar_t* from = q + item.row * q_stride + (first_head + row) * HEAD_DIM + column;
#endif
        f[i / 2].b[i % 2] = row < heads ? query_operand(*(const u32*)from) : 0u;
      }
    };
    Fragment query[QUERY_IN_SMEM ? 1 : K_STEPS][HEAD_TILES];  // by k step, the same in every warp
    Fragment* shared_query = (Fragment*)(smem + FRAGMENTS_AT) + lane;
    if (QUERY_IN_SMEM) {
      for (int k = warp; k < K_STEPS; k += NUM_WARPS) {
        load_query(k, query[0]);
        #pragma unroll
        for (int h = 0; h < HEAD_TILES; h++) shared_query[(k * HEAD_TILES + h) * 32] = query[0][h];
      }
      __syncthreads();
    } else {
      #pragma unroll
      for (int k = 0; k < K_STEPS; k++) load_query(k, query[k]);
    }

    // Of heads 2t and 2t + 1 of each tile: sums of columns g and g + 8 (or 2g and 2g + 1), maximum, denominator.
    float o[K_STEPS][HEAD_TILES][4], m[HEAD_TILES][2], l[HEAD_TILES][2];
    #pragma unroll
    for (int h = 0; h < HEAD_TILES; h++) {
      #pragma unroll
      for (int k = 0; k < K_STEPS; k++) o[k][h][0] = o[k][h][1] = o[k][h][2] = o[k][h][3] = 0.f;
      m[h][0] = m[h][1] = NO_MAXIMUM;
      l[h][0] = l[h][1] = 0.f;
    }
    const float score_scale = SCORE_SCALE(scale);

    next = work[min(index + advance, count - 1)];
    for (int i = 0; i < tiles.mine; i++) {
      copy_async_wait<STAGES - 1>();
      __syncwarp();
      u8* tile = Tiles::slot(smem, i, warp);
      const smem_t keys = smem_address(tile) + KvLayout::lane_offset(lane), values = keys + TILE_BYTES;
#if FUSED_ROPE
      if (has_newest && warp + i * NUM_WARPS == tiles.count - 1) {
        const Chunk* from = (const Chunk*)(smem + NEWEST_AT);
        for (int j = lane; j < 2 * KvLayout::CHUNKS; j += 32) {
          const u32 offset = KvLayout::offset(newest % TILE, j % KvLayout::CHUNKS);
          *(Chunk*)(tile + j / KvLayout::CHUNKS * TILE_BYTES + offset) = from[j];
        }
        __syncwarp();
      }
#endif

      // Scores of tokens g and g + 8, of heads 2t and 2t + 1 of each tile of heads.
      float s[HEAD_TILES][4] = {};
      #pragma unroll
      for (int load = 0; load < LOADS; load++) {
        KeyFragment f;
        f.load(keys, load);
        #pragma unroll
        for (int step = 0; step < K_STEPS_PER_LOAD; step++) {
          const int k = load * K_STEPS_PER_LOAD + step;
          if (k < K_STEPS)
            #pragma unroll
            for (int h = 0; h < HEAD_TILES; h++) {
              const Fragment b =
                  QUERY_IN_SMEM ? shared_query[(k * HEAD_TILES + h) * 32] : query[QUERY_IN_SMEM ? 0 : k][h];
              u32 a[4];
              f.left_operand(step, a);
              mma(s[h], a, b.b[0], b.b[1]);
            }
        }
      }

      const int offset = tiles.token_of(i, warp) - item.begin;  // of the tile
      const bool whole = offset >= 0 && offset + TILE <= (int)num_visible;
      bool rises = false;
      float highest[HEAD_TILES][2];
      #pragma unroll
      for (int h = 0; h < HEAD_TILES; h++)
        #pragma unroll
        for (int head = 0; head < 2; head++) {
          highest[h][head] = HIDDEN;
          #pragma unroll
          for (int e = head; e < 4; e += 2) {
            s[h][e] = cap_score(s[h][e], scale, cap);
            if (!whole && (u32)(offset + e / 2 * 8 + g) >= num_visible) s[h][e] = HIDDEN;
            highest[h][head] = fmaxf(highest[h][head], s[h][e]);
          }
          rises |= highest[h][head] * score_scale > m[h][head] + MAX_LAG;
        }
      if (__any_sync(~0u, rises)) {  // else no maximum would be raised
        #pragma unroll
        for (int h = 0; h < HEAD_TILES; h++)
          #pragma unroll
          for (int head = 0; head < 2; head++) {
            #pragma unroll
            for (int d = 4; d < 32; d *= 2)
              highest[h][head] = fmaxf(highest[h][head], __shfl_xor_sync(~0u, highest[h][head], d));
            const float factor = raise_maximum(m[h][head], highest[h][head] * score_scale);
            l[h][head] *= factor;
            #pragma unroll
            for (int k = 0; k < K_STEPS; k++) {
              o[k][h][head] *= factor;
              o[k][h][2 + head] *= factor;
            }
          }
      }
      u32 weights[HEAD_TILES][2];
      #pragma unroll
      for (int h = 0; h < HEAD_TILES; h++) {
        #pragma unroll
        for (int e = 0; e < 4; e++) {
          s[h][e] = exp2_fast(s[h][e] * score_scale - m[h][e % 2]);
          l[h][e % 2] += s[h][e];
        }
        weights[h][0] = transpose_8x8(pack_operand(s[h][0], s[h][1]));
        weights[h][1] = transpose_8x8(pack_operand(s[h][2], s[h][3]));
      }

      #pragma unroll
      for (int load = 0; load < LOADS; load++) {
        ValueFragment f;
        f.load(values, load);
        #pragma unroll
        for (int step = 0; step < K_STEPS_PER_LOAD; step++) {
          const int k = load * K_STEPS_PER_LOAD + step;
          if (k < K_STEPS) {
            u32 a[4];
            f.left_operand(step, a);
            #pragma unroll
            for (int h = 0; h < HEAD_TILES; h++) mma(o[k][h], a, weights[h][0], weights[h][1]);
          }
        }
      }
      __syncwarp();  // all lanes have read the tile
      tiles.load(i + STAGES, smem, warp, lane);
    }
    const bool is_last_item = index + advance >= count;
    if (!is_last_item) tiles.begin_item(next, reads_newest(next), block_table, table_stride, warp, lane);

    // The warps' sums, in shared memory in place of tiles.
    __syncthreads();
    float* sums = (float*)smem;                             // [NUM_WARPS][MAX_HEADS][SUM_STRIDE]
    float* maxima = sums + SUMS;                            // [NUM_WARPS][MAX_HEADS]
    float* denominators = maxima + NUM_WARPS * MAX_HEADS;   // [NUM_WARPS][MAX_HEADS]
    #pragma unroll
    for (int h = 0; h < HEAD_TILES; h++)
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        #pragma unroll
        for (int d = 4; d < 32; d *= 2) l[h][e] += __shfl_xor_sync(~0u, l[h][e], d);
        const int head = 8 * h + 2 * t + e, row = warp * MAX_HEADS + head;
        if (head < heads) {
          #pragma unroll
          for (int k = 0; k < K_STEPS; k++) store_columns(sums + row * SUM_STRIDE, k, g, o[k][h][e], o[k][h][2 + e]);
          if (g == 0) {
            maxima[row] = m[h][e];
            denominators[row] = l[h][e];
          }
        }
      }
    if (!is_last_item)
      #pragma unroll 1
      for (int i = 0; i < EARLY_TILES; i++) tiles.load(i, smem, warp, lane);
    __syncthreads();
    constexpr int QUADS = HEAD_DIM / 4;
    for (int i = thread; i < heads * QUADS; i += THREADS) {
      const int row = i / QUADS, column = i % QUADS * 4;
      float top = maxima[row];
      #pragma unroll
      for (int w = 1; w < NUM_WARPS; w++) top = fmaxf(top, maxima[w * MAX_HEADS + row]);
      float denominator = 0.f;
      Float4 sum = {0.f, 0.f, 0.f, 0.f};
      #pragma unroll
      for (int w = 0; w < NUM_WARPS; w++) {
        const float weight = exp2_fast(maxima[w * MAX_HEADS + row] - top);
        const Float4 part = *(const Float4*)(sums + (w * MAX_HEADS + row) * SUM_STRIDE + column);
        denominator += weight * denominators[w * MAX_HEADS + row];
        sum.x += weight * part.x;
        sum.y += weight * part.y;
        sum.z += weight * part.z;
        sum.w += weight * part.w;
      }
      const float unit = denominator > 0.f ? v_scale / denominator : 0.f;  // no token: zeros
      sum = Float4{sum.x * unit, sum.y * unit, sum.z * unit, sum.w * unit};
      const int head = first_head + row;
      if (item.part < 0) {
        store_scalars(out + ((long long)item.row * num_heads + head) * HEAD_DIM + column, sum);
      } else {
        *(Float4*)(part_o + ((long long)item.part * num_heads + head) * HEAD_DIM + column) = sum;
        if (column == 0)
          part_lse[(long long)item.part * num_heads + head] = denominator > 0.f ? top + log2_fast(denominator) : NO_MAXIMUM;
      }
    }
    if (item.part < 0) continue;

    // Last to arrive? The counter falls back to zero for the next launch.
    __threadfence();
    __syncthreads();
    int* is_last_part = (int*)(denominators + NUM_WARPS * MAX_HEADS);
    if (thread == 0) {
      const u32 before = atomicInc(arrivals + (long long)item.split * gridDim.x + blockIdx.x, item.num_parts - 1);
      *is_last_part = before == (u32)item.num_parts - 1;
    }
    __syncthreads();
    if (!*is_last_part) continue;
    __threadfence();
    float* weights = sums;  // [heads][num_parts], normalised
    const float* lse = part_lse + (long long)item.first_part * num_heads + first_head;
    for (int row = warp; row < heads; row += NUM_WARPS) {
      float top = NO_MAXIMUM, total = 0.f;
      for (int i = lane; i < item.num_parts; i += 32) top = fmaxf(top, load_float_l2(lse + i * num_heads + row));
      #pragma unroll
      for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      for (int i = lane; i < item.num_parts; i += 32) {
        const float weight = exp2_fast(load_float_l2(lse + i * num_heads + row) - top);
        weights[row * item.num_parts + i] = weight;
        total += weight;
      }
      #pragma unroll
      for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
      for (int i = lane; i < item.num_parts; i += 32) weights[row * item.num_parts + i] /= total;
    }
    __syncthreads();
    for (int i = thread; i < heads * QUADS; i += THREADS) {
      const int row = i / QUADS, column = i % QUADS * 4, head = first_head + row;
      const float* from = part_o + ((long long)item.first_part * num_heads + head) * HEAD_DIM + column;
      const Float4 sum = merge_parts(from, weights + row * item.num_parts, item.num_parts, num_heads * HEAD_DIM);
      store_scalars(out + ((long long)item.row * num_heads + head) * HEAD_DIM + column, sum);
    }
  }
  wait_once();  // also without an item: the next kernel relies on it (dependent_launch.cuh)
}
