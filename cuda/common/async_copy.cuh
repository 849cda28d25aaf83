// Shared memory addresses and copies from global to shared memory that do not pass through registers
// (cp.async, sm_80 and later). Copies of a thread form groups in the order of its commits.
//
//   smem_t   an address in shared memory, a number of bytes
#pragma once
#include "dtype.cuh"

#ifdef SLUICE_EMULATE

typedef u64 smem_t;
DEV smem_t smem_address(void* p) { return (smem_t)p; }

DEV void copy_async_16(smem_t to, const void* from, bool valid) {
  emu::copy_later((void*)to, valid ? from : nullptr, 16);
}
DEV void copy_async_commit() { emu::commit_copies(); }
template <int PENDING> DEV void copy_async_wait() { emu::finish_copies(PENDING); }

#else

typedef u32 smem_t;
DEV smem_t smem_address(void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes; both addresses are multiples of 16. Past the L1 cache: every byte is wanted once. Zeros if not
// `valid`; `from` is not read then.
DEV void copy_async_16(smem_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEV void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `PENDING` of this thread's latest groups are unfinished. Other threads see the bytes
// after a barrier on top.
template <int PENDING> DEV void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

#endif
