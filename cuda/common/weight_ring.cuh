// Rows of weight matrices on their way through shared memory: a warp that fetches them by bulk copies, and WARPS
// that multiply. (cp.async.bulk, PTX ISA 8.0; Hopper.)
//
//   slot    a piece of a row: PIECE_CHUNKS * CHUNK columns, or what is left of the row; PITCH bytes apart
//   flight  the same piece of the up to 16 rows of a tile, in neighbouring slots: what is waited for at once
//
// Which flights there are, and in which order, depends on the shapes and the block alone: both sides walk the same
// sequence through all products and layers, and weights depend on nothing that a kernel writes. So the next ones
// are on their way as soon as there is room, whatever else the block waits for.
//
//   -DSLOTS=n   -DPIECE_CHUNKS=n, at least WARPS
#pragma once
#include "common/sm90.cuh"

constexpr int WARPS = 8;           // that multiply; the next one fetches
constexpr int CHUNK = 64;          // columns that a warp multiplies at once
constexpr int PIECE = PIECE_CHUNKS * CHUNK;
// Lanes 4 g + t read 16 bytes at 16 t of row g: half a turn through the banks from row to row.
constexpr int PITCH = PIECE * 2 + 64;
constexpr int FLIGHTS = 32;        // at a time, at most: one for each lane
constexpr int RING_BYTES = (SLOTS * PITCH + 1023) / 1024 * 1024;
static_assert(PIECE_CHUNKS >= WARPS, "a warp finds at most one border of pieces between two of its chunks");
static_assert(SLOTS >= 32, "two flights at least");

#ifdef SLUICE_EMULATE
DEV void bulk_load(u32 smem, const void* from, u32 bytes, u32 barrier) {
  EmulatedMbarrier* counter = &emulated_mbarrier(barrier);
  u8* to = shared_pointer(smem);
  emu::later([=] {
    __builtin_memcpy(to, from, bytes);
    counter->bytes -= (int)bytes;
    counter->settle();
  });
}
#else
// All of it multiples of 16 bytes. Whatever is read once should not drive out of L2 what is read again.
DEV void bulk_load(u32 smem, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n}"
      :: "r"(smem), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
#endif

// Of a product's outputs, those of this block.
struct Slice {
  int first, count;
  static DEV Slice of(int outputs) {
    const int each = outputs / (int)gridDim.x, larger = outputs % (int)gridDim.x, block = blockIdx.x;
    return {block * each + min(block, larger), each + (block < larger)};
  }
};

// Rows of W that a tile consists of: `low` of them are its rows 0, 1, ..., `high` its rows 8, 9, ...
// GATED: gates, and the ups that belong to them; else the second eight.
template <bool GATED> struct TileRows {
  static constexpr int OUTPUTS = GATED ? 8 : 16;
  int low, high;
  DEV TileRows(int outputs_left) {
    const int outputs = min(outputs_left, OUTPUTS);
    low = min(outputs, 8);
    high = GATED ? low : outputs - low;
  }
  // Row of W of the tile's `index`-th row in the ring. Gate and up are interleaved by eights.
  DEV int row_of_w(int first_output, int index) const {
    const int upper = index >= low, output = first_output + (index - upper * low) + (GATED ? 0 : 8 * upper);
    return GATED ? output / 8 * 16 + output % 8 + 8 * upper : output;
  }
};

// Where in the sequence one side is.
struct RingPosition {
  int slot = 0;
  u32 flight = 0;

  static DEV int wrapped(int slot) { return slot >= SLOTS ? slot - SLOTS : slot; }
  DEV void advance(int rows, int flights = 1) {
    slot = wrapped(slot + rows);
    flight += flights;
  }
};

struct WeightRing {
  u32 slots;           // addresses in shared memory
  u32 full, empty;     // [FLIGHTS] mbarriers each

  DEV void init() const {
    for (int i = 0; i < FLIGHTS; i++) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, WARPS);
    }
    mbarrier_init_fence();
  }
  DEV u32 full_of(u32 flight) const { return full + flight % FLIGHTS * 8; }
  DEV u32 empty_of(u32 flight) const { return empty + flight % FLIGHTS * 8; }
};

// The warp that fetches.
struct WeightSource {
  WeightRing ring;
  RingPosition at;
  u32 oldest = 0;        // flight whose slots have not been given back
  int free_slots = SLOTS;
  int rows_under_way = 0;  // lane l: of the last flight whose number is l modulo FLIGHTS

  DEV void reserve(int rows) {
    while (free_slots < rows || at.flight - oldest >= FLIGHTS) {
      mbarrier_wait(ring.empty_of(oldest), oldest / FLIGHTS & 1);
      free_slots += __shfl_sync(~0u, rows_under_way, oldest % FLIGHTS);
      oldest++;
    }
    free_slots -= rows;
    if ((threadIdx.x & 31) == at.flight % FLIGHTS) rows_under_way = rows;
  }

  // The block's rows of W [outputs or 2 * outputs, K].
  template <int K, bool GATED> DEV void fetch(const scalar_t* w, Slice slice) {
    const int lane = threadIdx.x & 31;
    for (int done = 0; done < slice.count; done += TileRows<GATED>::OUTPUTS) {
      const TileRows<GATED> tile(slice.count - done);
      const int rows = tile.low + tile.high;
      const scalar_t* row = w + (i64)tile.row_of_w(slice.first + done, min(lane, rows - 1)) * K;
      for (int column = 0; column < K; column += PIECE) {
        reserve(rows);
        const u32 barrier = ring.full_of(at.flight), bytes = 2 * min(PIECE, K - column);
        if (lane == 0) mbarrier_arrive_expect(barrier, rows * bytes);
        __syncwarp();
        if (lane < rows)
          bulk_load(ring.slots + RingPosition::wrapped(at.slot + lane) * PITCH, row + column, bytes, barrier);
        at.advance(rows);
      }
    }
  }
};
