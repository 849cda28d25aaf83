// The tiles of a work item on their way from the cache to shared memory.
//
//   -DSTAGES -DNUM_WARPS -DBLOCK_SIZE   and of kv_tile.cuh
//
// Each warp has a ring of STAGES slots of its own, each of keys and then values of TILE tokens. The rings lie side
// by side: all warps' first slots, all warps' second slots, and so on.
#pragma once
#include "common/async_copy.cuh"
#include "common/kv_tile.cuh"
#include "common/work_item.cuh"

constexpr int TILE = 16;  // tokens, as tensor cores take them
constexpr int TILE_BYTES = TILE * KvLayout::STRIDE;
constexpr int STAGE_BYTES = 2 * TILE_BYTES;
constexpr int SLOT_BYTES = NUM_WARPS * STAGE_BYTES;  // of all warps
static_assert(BLOCK_SIZE % TILE == 0, "a tile must not straddle blocks of the cache");

// An item's tiles, as one of the warps reads them. The first one goes to slot FIRST_SLOT.
template <int FIRST_SLOT> struct TileRing {
  const u8 *k_cache, *v_cache;
  int num_kv_heads, kv_head;

  const int* table_row;
  int begin, num_cached;     // tokens: the item's first, and how many come from the cache
  int first_token;           // of the item's first tile
  int count, mine;           // tiles of the item, and of the warp: those at warp, warp + NUM_WARPS ...
  int blocks, later_blocks;  // ids for the warp's tiles: lane j holds that of tile 32 * n + j, loaded 32 tiles ahead

  static DEV u8* slot(u8* smem, int tile, int warp) {
    return smem + ((tile + FIRST_SLOT) % STAGES * NUM_WARPS + warp) * STAGE_BYTES;
  }
  DEV int token_of(int tile, int warp) const { return first_token + (warp + tile * NUM_WARPS) * TILE; }
  DEV int block_of(int tile, int warp) const { return tile < mine ? table_row[token_of(tile, warp) / BLOCK_SIZE] : 0; }

  // `has_newest`: the item's last token is not in the cache yet.
  DEV void begin_item(const WorkItem& item, bool has_newest, const int* table, int table_stride, int warp, int lane) {
    table_row = table + (long long)item.table_row * table_stride;
    begin = item.begin;
    num_cached = item.end - item.begin - has_newest;
    first_token = item.begin & ~(TILE - 1);
    count = (item.end - first_token + TILE - 1) / TILE;
    mine = (count - warp + NUM_WARPS - 1) / NUM_WARPS;
    blocks = block_of(lane, warp);
    later_blocks = block_of(32 + lane, warp);
  }

  // In order; each call's copies are a group, of no copies behind the last tile.
  DEV void load(int tile, u8* smem, int warp, int lane) {
    if (tile < mine) {
      if (tile > 0 && tile % 32 == 0) {
        blocks = later_blocks;
        later_blocks = block_of(tile + 32 + lane, warp);
      }
      const long long block = __shfl_sync(~0u, blocks, tile & 31);
      const int token = token_of(tile, warp);
      const long long start = ((block * num_kv_heads + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE) * KV_ROW_BYTES;
      const u8 *keys = k_cache + start, *values = v_cache + start;
      const smem_t to = smem_address(slot(smem, tile, warp));
      constexpr int CHUNKS = TILE * KvLayout::CHUNKS;
      #pragma unroll
      for (int j = 0; j < (CHUNKS + 31) / 32; j++) {
        const int i = j * 32 + lane, row = i / KvLayout::CHUNKS;
        if (CHUNKS % 32 == 0 || i < CHUNKS) {
          // others become zeros, whatever lies there: a weight of zero times NaN would be NaN
          const bool wanted = (u32)(token + row - begin) < (u32)num_cached;
          const u32 offset = KvLayout::offset(row, i % KvLayout::CHUNKS);
          copy_async_16(to + offset, keys + i * 16, wanted);
          copy_async_16(to + TILE_BYTES + offset, values + i * 16, wanted);
        }
      }
    }
    copy_async_commit();
  }
};
