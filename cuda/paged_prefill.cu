// Causal attention of prompt chunks over paged keys and values, for sm_80 and later: see
// engine/ops/paged_prefill.py for the contract and the choice of the macros.
//
//   -DHEAD_DIM -DBLOCK_SIZE -DGROUP (query heads per KV head)  -DSCALAR_...  of kv_tile.cuh: -DKV_... -DSOFTCAP
//   -DNUM_WARPS  -DM_TILES (16 rows each, of a warp)  -DKEYS (tokens of a tile)  -DBLOCKS_PER_SM
//
// After FlashAttention-2 (https://arxiv.org/abs/2307.08691). A thread block takes one work item and one KV
// head. Its rows are the GROUP query heads of consecutive queries, so that short chunks fill a tile, too:
//
//   row    0   1  ...  G - 1   G  G + 1 ...
//   query  0   0  ...    0     1    1   ...      Q_ROWS rows hold POSITIONS whole queries
//   head   0   1  ...  G - 1   0    1   ...
//
// Key tiles are visited from the last backwards: those that need a mask come first. Tile i - 1 is copied
// (cp.async, double buffered) while tile i is multiplied; one barrier a tile.
#include "common/dtype.cuh"
#include "common/async_copy.cuh"
#include "common/mma.cuh"
#include "common/kv_tile.cuh"

constexpr int THREADS = NUM_WARPS * 32;
constexpr int WARP_ROWS = M_TILES * 16;
constexpr int Q_ROWS = NUM_WARPS * WARP_ROWS;
constexpr int POSITIONS = Q_ROWS / GROUP;
constexpr int Q_BYTES = Q_ROWS * QueryLayout::STRIDE;
constexpr int TILE_BYTES = KEYS * KvLayout::STRIDE;
constexpr int TILE_BLOCKS = KEYS > BLOCK_SIZE ? KEYS / BLOCK_SIZE : 1;  // of the cache, in a tile
static_assert(POSITIONS > 0, "more query heads per KV head than rows");
static_assert(KEYS % BLOCK_SIZE == 0 || BLOCK_SIZE % KEYS == 0, "block size");

struct alignas(16) Chunk { u32 words[4]; };
struct alignas(16) PrefillItem { int batch_row, q_row, q_len, kv_len; };

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) paged_prefill(
    scalar_t* __restrict__ out,           // [tokens, num_heads, HEAD_DIM]
    const scalar_t* __restrict__ q,       // [tokens, num_heads, HEAD_DIM], tokens q_stride apart
    const kv_t* __restrict__ k_cache,     // [blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    const kv_t* __restrict__ v_cache,
    const int* __restrict__ block_table,  // [table rows, table_stride]
    const int* __restrict__ rows,         // table row of each batch row
    const PrefillItem* __restrict__ work, // [gridDim.x / num_kv_heads]
    const int* __restrict__ num_items,    // of `work` that count, or null: all
    const int* __restrict__ q_start,      // first token of each batch row
    long long q_stride, int table_stride, int num_kv_heads, int window, float scale, float cap, float v_scale)
{
  extern __shared__ __align__(128) u8 smem[];
  __shared__ int kept_first_token, kept_num_queries;  // for the end: registers are scarce
  const int index = blockIdx.x / num_kv_heads;
  if (num_items != nullptr && index >= *num_items) return;
  const PrefillItem item = work[index];
  const int kv_head = blockIdx.x % num_kv_heads;
  if (item.q_row >= item.q_len) return;  // padding of the list
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int num_heads = num_kv_heads * GROUP;
  const int first_token = q_start[item.batch_row] + item.q_row;
  const int num_queries = min(POSITIONS, item.q_len - item.q_row);
  const int first_pos = item.kv_len - item.q_len + item.q_row;  // in the sequence
  const int key_begin = max(0, first_pos - window + 1), key_end = first_pos + num_queries;
  const int first_tile = key_begin / KEYS, last_tile = (key_end - 1) / KEYS;
  scale *= KV_UNIT;
  v_scale *= KV_UNIT;
  const float score_scale = SCORE_SCALE(scale);
  if (threadIdx.x == 0) {
    kept_first_token = first_token;
    kept_num_queries = num_queries;
  }

  // Lane i of every warp holds the id of block i of the tile to be loaded next.
  const int* table_row = block_table + (long long)rows[item.batch_row] * table_stride;
  auto block_of = [&](int tile) {
    const int token = tile * KEYS + lane * BLOCK_SIZE;
    return lane < TILE_BLOCKS && tile >= first_tile && token < key_end ? table_row[token / BLOCK_SIZE] : 0;
  };
  const smem_t queries = smem_address(smem), ring = queries + Q_BYTES;
  const smem_t my_queries = queries + warp * WARP_ROWS * QueryLayout::STRIDE + QueryLayout::lane_offset(lane);
  auto load_tile = [&](int tile, int blocks) {
    const smem_t to = ring + tile % 2 * 2 * TILE_BYTES;
    constexpr int CHUNKS = KEYS * KvLayout::CHUNKS;
    #pragma unroll
    for (int j = 0; j < (CHUNKS + THREADS - 1) / THREADS; j++) {
      const int i = j * THREADS + threadIdx.x;
      if (CHUNKS % THREADS == 0 || i < CHUNKS) {  // the same in a whole warp
        constexpr int ROWS = THREADS / KvLayout::CHUNKS;  // if whole: rows differ by constants, which saves registers
        constexpr bool WHOLE = THREADS % KvLayout::CHUNKS == 0;
        const int row = WHOLE ? threadIdx.x / KvLayout::CHUNKS + j * ROWS : i / KvLayout::CHUNKS;
        const int chunk = WHOLE ? threadIdx.x % KvLayout::CHUNKS : i % KvLayout::CHUNKS;
        const int token = tile * KEYS + row;
        const long long block = __shfl_sync(~0u, blocks, row / BLOCK_SIZE);
        const long long start =
            ((block * num_kv_heads + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE) * KV_ROW_BYTES + chunk * 16;
        // tokens that no query sees become zeros, whatever lies there: 0 * NaN would be NaN
        const bool visible = (u32)(token - key_begin) < (u32)(key_end - key_begin);
        const u32 offset = KvLayout::offset(row, chunk);
        copy_async_16(to + offset, (const u8*)k_cache + start, visible);
        copy_async_16(to + TILE_BYTES + offset, (const u8*)v_cache + start, visible);
      }
    }
  };

  for (int i = threadIdx.x; i < Q_ROWS * QueryLayout::CHUNKS; i += THREADS) {
    const int row = i / QueryLayout::CHUNKS, chunk = i % QueryLayout::CHUNKS;
    const scalar_t* from = q + (long long)(first_token + row / GROUP) * q_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM + chunk * 8;
    copy_async_16(queries + QueryLayout::offset(row, chunk), from, row < num_queries * GROUP);
  }
  load_tile(last_tile, block_of(last_tile));
  copy_async_commit();
  int blocks = block_of(last_tile - 1);

#if KV_FP8
  // Queries as fp16, their columns in the places that the keys' operands have (query_column).
  copy_async_wait<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < Q_ROWS * K_STEPS; i += THREADS) {
    const int row = i / K_STEPS, k = i % K_STEPS;
    Chunk* low = (Chunk*)(smem + QueryLayout::offset(row, 2 * k));
    Chunk* high = (Chunk*)(smem + QueryLayout::offset(row, 2 * k + 1));
    const Chunk a = *low, b = *high;
    *low = Chunk{query_operand(a.words[0]), query_operand(a.words[2]), query_operand(b.words[0]), query_operand(b.words[2])};
    *high = Chunk{query_operand(a.words[1]), query_operand(a.words[3]), query_operand(b.words[1]), query_operand(b.words[3])};
  }
#endif

  float o[M_TILES][N_TILES][4];
  float m[M_TILES][2], l[M_TILES][2];  // of rows g and g + 8
  #pragma unroll
  for (int i = 0; i < M_TILES; i++) {
    m[i][0] = m[i][1] = NO_MAXIMUM;
    l[i][0] = l[i][1] = 0.f;
    #pragma unroll
    for (int n = 0; n < N_TILES; n++) o[i][n][0] = o[i][n][1] = o[i][n][2] = o[i][n][3] = 0.f;
  }

  for (int tile = last_tile; tile >= first_tile; tile--) {
    copy_async_wait<0>();
    __syncthreads();  // the tile has come, and nobody reads the one before any more
    if (tile > first_tile) {
      load_tile(tile - 1, blocks);
      copy_async_commit();
      blocks = block_of(tile - 2);
    }
    const smem_t keys = ring + tile % 2 * 2 * TILE_BYTES + KvLayout::lane_offset(lane), values = keys + TILE_BYTES;

    float s[M_TILES][KEYS / 8][4] = {};
    #pragma unroll
    for (int load = 0; load < LOADS; load++) {
      u32 a[K_STEPS_PER_LOAD][M_TILES][4];
      #pragma unroll
      for (int step = 0; step < K_STEPS_PER_LOAD; step++)
        #pragma unroll
        for (int i = 0; i < M_TILES; i++) {
          const int k = load * K_STEPS_PER_LOAD + step;
          if (k < K_STEPS)
            ldmatrix_x4(a[step][i], QueryLayout::at(my_queries, k) + i * 16 * QueryLayout::STRIDE);
        }
      #pragma unroll
      for (int n = 0; n < KEYS / 16; n++) {
        KeyFragment f;
        f.load(keys + n * 16 * KvLayout::STRIDE, load);
        #pragma unroll
        for (int step = 0; step < K_STEPS_PER_LOAD; step++)
          #pragma unroll
          for (int i = 0; i < M_TILES; i++)
            if (load * K_STEPS_PER_LOAD + step < K_STEPS) f.multiply(step, s[i][2 * n], s[i][2 * n + 1], a[step][i]);
      }
    }

#ifdef SOFTCAP
    #pragma unroll
    for (int i = 0; i < M_TILES; i++)
      #pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
        #pragma unroll
        for (int e = 0; e < 4; e++) s[i][n][e] = cap_score(s[i][n][e], scale, cap);
#endif
    if (tile * KEYS + KEYS - 1 > first_pos || tile * KEYS <= key_end - 1 - window) {
      #pragma unroll
      for (int i = 0; i < M_TILES; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
          const int pos = first_pos + (warp * WARP_ROWS + i * 16 + g + 8 * h) / GROUP;
          #pragma unroll
          for (int n = 0; n < KEYS / 8; n++)
            #pragma unroll
            for (int e = 0; e < 2; e++) {
              const int key = tile * KEYS + n * 8 + t * 2 + e;
              if (key > pos || key <= pos - window) s[i][n][2 * h + e] = HIDDEN;
            }
        }
    }

    #pragma unroll
    for (int i = 0; i < M_TILES; i++)
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        float highest = HIDDEN;
        #pragma unroll
        for (int n = 0; n < KEYS / 8; n++) highest = fmaxf(highest, fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
        const float factor = raise_maximum(m[i][h], highest * score_scale);
        if (__any_sync(~0u, factor != 1.f)) {
          l[i][h] *= factor;
          #pragma unroll
          for (int n = 0; n < N_TILES; n++) {
            o[i][n][2 * h] *= factor;
            o[i][n][2 * h + 1] *= factor;
          }
        }
        #pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
          #pragma unroll
          for (int e = 0; e < 2; e++) {
            s[i][n][2 * h + e] = exp2_fast(s[i][n][2 * h + e] * score_scale - m[i][h]);
            l[i][h] += s[i][n][2 * h + e];
          }
      }

    #pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
      u32 weights[M_TILES][4];
      #pragma unroll
      for (int i = 0; i < M_TILES; i++)
        #pragma unroll
        for (int e = 0; e < 4; e++)
          weights[i][e] = pack_operand(s[i][2 * k + e / 2][e % 2 * 2], s[i][2 * k + e / 2][e % 2 * 2 + 1]);
      #pragma unroll
      for (int load = 0; load < LOADS; load++) {
        ValueFragment f;
        f.load(values + k * 16 * KvLayout::STRIDE, load);
        #pragma unroll
        for (int n = 0; n < N_TILES_PER_LOAD; n++)
          #pragma unroll
          for (int i = 0; i < M_TILES; i++)
            if (load * N_TILES_PER_LOAD + n < N_TILES) f.multiply(n, o[i][load * N_TILES_PER_LOAD + n], weights[i]);
      }
    }
  }

  // Results take the place of the warp's own queries, which all its lanes have read, and leave from there in
  // whole chunks.
  __syncwarp();
  #pragma unroll
  for (int i = 0; i < M_TILES; i++)
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      l[i][h] += __shfl_xor_sync(~0u, l[i][h], 1);
      l[i][h] += __shfl_xor_sync(~0u, l[i][h], 2);
      const float unit = v_scale / l[i][h];
      const int row = warp * WARP_ROWS + i * 16 + g + 8 * h;
      #pragma unroll
      for (int pair = 0; pair < N_TILES; pair++) {
        float lo, hi;
        output_pair(o[i], pair, h, lo, hi);
        const int column = output_column(pair, t);
        *(u32*)(smem + QueryLayout::offset(row, column / 8) + column % 8 * 2) = pack2(lo * unit, hi * unit);
      }
    }
  __syncwarp();
  const int end_row = kept_num_queries * GROUP;
  const long long token = kept_first_token;
  for (int i = lane; i < WARP_ROWS * QueryLayout::CHUNKS; i += 32) {
    const int row = warp * WARP_ROWS + i / QueryLayout::CHUNKS, chunk = i % QueryLayout::CHUNKS;
    if (row < end_row) {
      scalar_t* to = out + ((token + row / GROUP) * num_heads + kv_head * GROUP + row % GROUP) * HEAD_DIM + chunk * 8;
      *(Chunk*)to = *(const Chunk*)(smem + QueryLayout::offset(row, chunk));
    }
  }
}
