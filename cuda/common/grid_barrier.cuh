// A barrier for all blocks of a grid that run at the same time (a cooperative launch), in two parts, so that a
// block may do between them what depends on no other; and loads of what other blocks have just written.
//
// Arrivals are counted in global memory and never taken back within a launch: the wait for the n-th barrier is
// for n times as many arrivals as there are blocks. Whoever leaves the kernel last makes the count zero again.
//
//   -DSYNC_THREADS=n    the first n threads of a block take part: a multiple of 32
//   -DSLUICE_TRAP=1     a wait that does not end traps (an error) instead of hanging the device
//   -DPROFILE=1         thread 0 leaves times (ns) of each phase: it waits, goes on, what the phase says, it is
//                       done, has arrived
#pragma once
#include "common/sm90.cuh"

constexpr int SYNC_BARRIER = 1;  // named barrier of a block's part

// Among the block's threads that take part.
DEV void sync_part() { named_barrier_sync(SYNC_BARRIER, SYNC_THREADS); }

#ifdef SLUICE_EMULATE

DEV uint4 load16_l2(const void* p) { return *(const uint4*)p; }
DEV u16 load2_l2(const void* p) { return *(const u16*)p; }
DEV void add_release(u32* p) { *p += 1, emu::progress++; }
DEV u32 load_acquire(const u32* p) { emu::yield(); return *p; }

#else

// Never from L1, which may hold what was there before.
DEV uint4 load16_l2(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEV u16 load2_l2(const void* p) {
  u16 v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}
DEV void add_release(u32* p) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(p) : "memory"); }
DEV u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

#endif

struct GridBarrier {
  u32* arrivals;   // zero before the launch and after it
  u32* departures;
  u32 expected;    // arrivals that the next wait is for
#ifdef PROFILE
  u64* stamps;
  DEV void stamp() {
    u64 time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time) :: "memory");
    if (threadIdx.x == 0) *stamps++ = time;
  }
#else
  DEV void stamp() {}
#endif

  // What the block's part has written so far will be visible behind the others' next wait.
  DEV void arrive() {
    stamp();
    sync_part();
    if (threadIdx.x == 0) add_release(arrivals);
    expected += gridDim.x;
    stamp();
  }
  // The last warp looks, as the first may still be busy with its arrival.
  DEV void wait() {
    stamp();
    if (threadIdx.x == SYNC_THREADS - 32) {
#ifdef SLUICE_TRAP
      u32 tries = 0;
#endif
      while ((int)(load_acquire(arrivals) - expected) < 0) {
#ifdef SLUICE_TRAP
        if (++tries > (1u << 22)) __trap();
#endif
      }
    }
    sync_part();
    stamp();
  }
  // After the last arrival. Who comes last knows that all have passed their last wait.
  DEV void leave() {
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicInc(departures, gridDim.x - 1) == gridDim.x - 1) *arrivals = 0;
  }
};
