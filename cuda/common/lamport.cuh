// Vectors that the blocks of a running grid hand to each other through L2, without a barrier: a number that has not
// come yet reads as all ones. That is a NaN which no arithmetic and no conversion makes (theirs is 0x7fff, 0x7fffffff), so
// readers look again until they find none. Each number speaks for itself: no order among stores is relied upon.
// (The buffers of latency-bound all-reduce kernels, named after L. Lamport, "On interprocess communication", 1986.)
//
// Vectors must be emptied between two uses. Blocks' parts take turns in phases; each block reads all of the vector
// that the phase before has left, then adds its part of the next one. So whoever finds phase n's vector complete knows
// that all have read phase n - 1's, and may empty its own part of that. This is done by a warp that does nothing
// else, the cleaner, on whose stores the block's sums wait a phase later:
//
//   those who multiply    x complete ── arrive READ ── products ── sync SUMS ── results
//   the cleaner           sync READ ── arrive SUMS (what was emptied before, all see) ── empty ── fence
//
// Readers come back to an emptied part after at least one complete vector that this block has a part in, made
// behind SUMS: each block must have a part of every product.
//
//   -DSYNC_THREADS=n    the first n threads of a block compute: a multiple of 32
//   -DSLUICE_TRAP=1     a wait that does not end traps (an error) instead of hanging the device
//   -DPROFILE=1         thread 0 leaves clock readings
#pragma once
#include "common/row_parts.cuh"
#include "common/sm90.cuh"
#include "common/vec.cuh"

constexpr int PART_BARRIER = 1, READ_BARRIER = 2, SUMS_BARRIER = 3;  // named barriers
constexpr int WITH_CLEANER = SYNC_THREADS + 32;

// Among the threads that compute.
DEV void sync_part() { named_barrier_sync(PART_BARRIER, SYNC_THREADS); }

constexpr u32 EMPTY = ~0u;

#ifdef SLUICE_EMULATE

DEV uint4 load16_l2(const void* p) { return *(const uint4*)p; }
DEV void store2_l2(void* p, u16 v) { *(u16*)p = v, emu::progress++; }
DEV void store4_l2(void* p, u32 v) { *(u32*)p = v, emu::progress++; }
DEV void store8_l2(void* p, u32 lo, u32 hi) { ((u32*)p)[0] = lo, ((u32*)p)[1] = hi, emu::progress++; }
DEV void store16_l2(void* p, uint4 v) { *(uint4*)p = v, emu::progress++; }
DEV void fence_l2() {}
DEV void prefetch_l2(const void*, u32) {}

#else

// Never from L1, which may hold what was there before.
DEV uint4 load16_l2(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEV void store2_l2(void* p, u16 v) { asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" :: "l"(p), "h"(v) : "memory"); }
DEV void store4_l2(void* p, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
DEV void store8_l2(void* p, u32 lo, u32 hi) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" :: "l"(p), "r"(lo), "r"(hi) : "memory");
}
DEV void store16_l2(void* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// This thread's stores so far are seen before its later ones. Leaves L1 alone, unlike __threadfence().
DEV void fence_l2() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// From the device's memory to L2; address and bytes are multiples of 16.
DEV void prefetch_l2(const void* p, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(p), "r"(bytes) : "memory");
}

#endif

// Of scalars: nonzero if one of a word's halves is all ones.
DEV u32 gaps(u32 pair) { return (~pair - 0x00010001u) & pair & 0x80008000u; }
DEV bool has_gap(const uint4& v) { return (gaps(v.x) | gaps(v.y) | gaps(v.z) | gaps(v.w)) != 0; }

// Between two looks. Every lane looks for itself.
struct Patience {
  u32 tries = 0;
  DEV void look_again() {
#ifdef SLUICE_EMULATE
    emu::yield();
#elif defined(SLUICE_TRAP)
    if (++tries > (1u << 22)) asm volatile("trap;");
#endif
  }
};

struct Stopwatch {
#ifdef PROFILE
  u64* stamps;
  DEV void stamp() {
    if (threadIdx.x != 0) return;
    u64 time;
    asm volatile("mov.u64 %0, %clock64;" : "=l"(time) :: "memory");
    *stamps++ = time;
  }
#else
  DEV void stamp() {}
#endif
};
