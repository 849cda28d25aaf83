// What Hopper adds: mbarriers with transaction counts, the tensor copy engine (TMA), warpgroup matrix
// products (wgmma) and register reallocation. Inline PTX (PTX ISA 8.0), for sm_90a.
//
// A tile in shared memory is rows of 64 16-bit elements (128 bytes), written by TMA with the 128-byte
// swizzle: 16-byte chunk c of row r lies at chunk c ^ (r & 7). Its base is a multiple of 1024 bytes.
// Wider matrices are several such tiles, one after another. Shared memory addresses are 32-bit (u32).
//
//   -DSLUICE_TRAP=1   a wait that does not end traps (an error) instead of hanging the device
#pragma once
#include "common/dependent_launch.cuh"
#include "common/dtype.cuh"
#include "common/sm90_emulated.cuh"

#ifndef SLUICE_EMULATE

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void store_zeros_16(u32 smem) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" :: "r"(smem), "r"(0) : "memory");
}

// --- mbarriers. Waiting for parity p returns once phase p (0, 1, 0, ...) of the barrier is complete ---

DEV void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; a __syncthreads() must follow.
DEV void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEV void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Arrives, and lets the phase also wait for `bytes` bytes of copies that name this barrier.
DEV void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// At the barrier that lies at this address in block `rank` of the cluster. Orders nothing but this block's
// own accesses: a release at the scope of the cluster would wait for the memory, most of a microsecond.
DEV void mbarrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
               :: "r"(barrier), "r"(rank) : "memory");
}

DEV bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0;
}

DEV void mbarrier_wait(u32 barrier, u32 parity) {
#ifdef SLUICE_TRAP
  for (u32 i = 0; i < (1u << 22); i++)
    if (mbarrier_try_wait(barrier, parity)) return;
  asm volatile("trap;");
#else
  while (!mbarrier_try_wait(barrier, parity)) {}
#endif
}

// --- Named barriers among `threads` threads (a multiple of 32); id 0 is __syncthreads()'s ---

DEV void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
DEV void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// --- TMA. A tensor map is a kernel parameter: const __grid_constant__ TensorMap map ---

struct alignas(64) TensorMap { u64 words[16]; };

// Copies the map's box, whose first element has these coordinates (innermost first), to `smem`.
// Elements outside the tensor arrive as zeros and count as bytes all the same.
DEV void tma_load_2d(u32 smem, const TensorMap* map, u32 barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      :: "r"(smem), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}
DEV void tma_load_3d(u32 smem, const TensorMap* map, u32 barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      :: "r"(smem), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

// Fetches the map itself, ahead of the first copy that needs it.
DEV void tensor_map_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
}

// Orders this thread's plain writes to shared memory before later reads by wgmma or TMA.
DEV void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- Registers: a warpgroup gives some up or takes some. Needs __launch_bounds__(threads, 1) ---

template <int REGISTERS> DEV void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS> DEV void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

// --- wgmma: 128 threads multiply [64, 16] by [16, N] into float32 registers, asynchronously ---
//
// Accumulator of a thread, N / 2 numbers: with warp w of the warpgroup, g = lane / 4 and t = lane % 4,
//   d[4 * i + 0, 1]  row 16 * w + g,      columns 8 * i + 2 * t and + 1
//   d[4 * i + 2, 3]  row 16 * w + g + 8,  the same columns
// A from registers is the m16n8k16 fragment, so a pair of neighbouring accumulators packed to 16 bits is
// at once the A operand of the next product: k step j takes accumulators 8 * j ... 8 * j + 7.

DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `PENDING` of this warpgroup's committed groups are unfinished.
template <int PENDING> DEV void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// To be called behind the wait: the compiler takes the accumulators for written when the product is started,
// and might read them, for what comes later, in front of it.
template <int SIZE> DEV void wgmma_results(float (&d)[SIZE]) {
#pragma unroll
  for (int i = 0; i < SIZE; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}

#if defined(SCALAR_FP16)
#define WGMMA_TYPES "f32.f16.f16"
#else
#define WGMMA_TYPES "f32.bf16.bf16"
#endif

// Lists of accumulators and of their names, by their number: N / 2.
#define WGMMA_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D8(d, i) WGMMA_D4(d, i), WGMMA_D4(d, i + 4)
#define WGMMA_D12(d, i) WGMMA_D8(d, i), WGMMA_D4(d, i + 8)
#define WGMMA_D16(d, i) WGMMA_D8(d, i), WGMMA_D8(d, i + 8)
#define WGMMA_D20(d, i) WGMMA_D16(d, i), WGMMA_D4(d, i + 16)
#define WGMMA_D24(d, i) WGMMA_D16(d, i), WGMMA_D8(d, i + 16)
#define WGMMA_D28(d, i) WGMMA_D16(d, i), WGMMA_D12(d, i + 16)
#define WGMMA_D32(d, i) WGMMA_D16(d, i), WGMMA_D16(d, i + 16)
#define WGMMA_D36(d, i) WGMMA_D32(d, i), WGMMA_D4(d, i + 32)
#define WGMMA_D40(d, i) WGMMA_D32(d, i), WGMMA_D8(d, i + 32)
#define WGMMA_D44(d, i) WGMMA_D32(d, i), WGMMA_D12(d, i + 32)
#define WGMMA_D48(d, i) WGMMA_D32(d, i), WGMMA_D16(d, i + 32)
#define WGMMA_D52(d, i) WGMMA_D32(d, i), WGMMA_D20(d, i + 32)
#define WGMMA_D56(d, i) WGMMA_D32(d, i), WGMMA_D24(d, i + 32)
#define WGMMA_D60(d, i) WGMMA_D32(d, i), WGMMA_D28(d, i + 32)
#define WGMMA_D64(d, i) WGMMA_D32(d, i), WGMMA_D32(d, i + 32)
#define WGMMA_D72(d, i) WGMMA_D64(d, i), WGMMA_D8(d, i + 64)
#define WGMMA_D80(d, i) WGMMA_D64(d, i), WGMMA_D16(d, i + 64)
#define WGMMA_D88(d, i) WGMMA_D64(d, i), WGMMA_D24(d, i + 64)
#define WGMMA_D96(d, i) WGMMA_D64(d, i), WGMMA_D32(d, i + 64)
#define WGMMA_D112(d, i) WGMMA_D64(d, i), WGMMA_D48(d, i + 64)
#define WGMMA_D128(d, i) WGMMA_D64(d, i), WGMMA_D64(d, i + 64)

#define WGMMA_NAMES_4 "%0, %1, %2, %3"
#define WGMMA_NAMES_8 WGMMA_NAMES_4 ", %4, %5, %6, %7"
#define WGMMA_NAMES_12 WGMMA_NAMES_8 ", %8, %9, %10, %11"
#define WGMMA_NAMES_16 WGMMA_NAMES_12 ", %12, %13, %14, %15"
#define WGMMA_NAMES_20 WGMMA_NAMES_16 ", %16, %17, %18, %19"
#define WGMMA_NAMES_24 WGMMA_NAMES_20 ", %20, %21, %22, %23"
#define WGMMA_NAMES_28 WGMMA_NAMES_24 ", %24, %25, %26, %27"
#define WGMMA_NAMES_32 WGMMA_NAMES_28 ", %28, %29, %30, %31"
#define WGMMA_NAMES_36 WGMMA_NAMES_32 ", %32, %33, %34, %35"
#define WGMMA_NAMES_40 WGMMA_NAMES_36 ", %36, %37, %38, %39"
#define WGMMA_NAMES_44 WGMMA_NAMES_40 ", %40, %41, %42, %43"
#define WGMMA_NAMES_48 WGMMA_NAMES_44 ", %44, %45, %46, %47"
#define WGMMA_NAMES_52 WGMMA_NAMES_48 ", %48, %49, %50, %51"
#define WGMMA_NAMES_56 WGMMA_NAMES_52 ", %52, %53, %54, %55"
#define WGMMA_NAMES_60 WGMMA_NAMES_56 ", %56, %57, %58, %59"
#define WGMMA_NAMES_64 WGMMA_NAMES_60 ", %60, %61, %62, %63"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_NAMES_80 WGMMA_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_88 WGMMA_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_112 WGMMA_NAMES_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_NAMES_128 WGMMA_NAMES_112 \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d = A B, or d += A B; A and B by descriptors, both with K along their rows. The operands a, b and p of the
// instruction follow its `a` accumulators.
#define WGMMA_SS(n, a, b, p)                                                                          \
  template <> struct WgmmaSs<n> {                                                                     \
    static DEV void run(float (&d)[n / 2], u64 da, u64 db, int add) {                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\n"                                   \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16." WGMMA_TYPES " {" WGMMA_NAMES_##a "}, " \
                   "%" #a ", %" #b ", p, 1, 1, 0, 0;\n}"                                              \
                   : WGMMA_D##a(d, 0) : "l"(da), "l"(db), "r"(add));                                  \
    }                                                                                                 \
  };
// d += A B; A from registers, B by descriptor with N along its rows.
#define WGMMA_RS(n, names, accumulators, a, b, accumulate)                                   \
  template <> struct WgmmaRs<n> {                                                            \
    static DEV void run(float (&d)[n / 2], const u32 (&fa)[4], u64 db, int add) {            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate ", 0;\n"                   \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16." WGMMA_TYPES " {" names "}, " \
                   "{" a "}, " b ", p, 1, 1, 1;\n}"                                          \
                   : accumulators                                                            \
                   : "r"(fa[0]), "r"(fa[1]), "r"(fa[2]), "r"(fa[3]), "l"(db), "r"(add));     \
    }                                                                                        \
  };

template <int N> struct WgmmaSs;
template <int N> struct WgmmaRs;
WGMMA_SS(8, 4, 5, 6) WGMMA_SS(16, 8, 9, 10) WGMMA_SS(24, 12, 13, 14)
WGMMA_SS(32, 16, 17, 18) WGMMA_SS(40, 20, 21, 22) WGMMA_SS(48, 24, 25, 26)
WGMMA_SS(56, 28, 29, 30) WGMMA_SS(64, 32, 33, 34) WGMMA_SS(72, 36, 37, 38)
WGMMA_SS(80, 40, 41, 42) WGMMA_SS(88, 44, 45, 46) WGMMA_SS(96, 48, 49, 50)
WGMMA_SS(104, 52, 53, 54) WGMMA_SS(112, 56, 57, 58) WGMMA_SS(120, 60, 61, 62)
WGMMA_SS(128, 64, 65, 66) WGMMA_SS(144, 72, 73, 74) WGMMA_SS(160, 80, 81, 82)
WGMMA_SS(176, 88, 89, 90) WGMMA_SS(192, 96, 97, 98) WGMMA_SS(224, 112, 113, 114)
WGMMA_SS(256, 128, 129, 130)
WGMMA_RS(64, WGMMA_NAMES_32, WGMMA_D32(d, 0), "%32, %33, %34, %35", "%36", "%37")
WGMMA_RS(128, WGMMA_NAMES_64, WGMMA_D64(d, 0), "%64, %65, %66, %67", "%68", "%69")

// N = 2 * (number of accumulators).
template <int SIZE> DEV void wgmma_ss(float (&d)[SIZE], u64 a, u64 b, int accumulate) {
  WgmmaSs<2 * SIZE>::run(d, a, b, accumulate);
}
template <int SIZE> DEV void wgmma_rs(float (&d)[SIZE], const u32 (&a)[4], u64 b, int accumulate) {
  WgmmaRs<2 * SIZE>::run(d, a, b, accumulate);
}

#endif  // SLUICE_EMULATE

// Operand descriptors for tiles as above. Bits 0-13 address / 16, 16-29 leading offset / 16, 32-45 stride
// offset / 16 (1024 bytes: from 8 rows to the next 8), 62-63 swizzle (1: 128 bytes).
//
// Rows are M or N, and the 64 columns are K. The next 16 columns are 32 bytes further.
DEV u64 descriptor_k_major(u32 smem) {
  return (u64)((smem & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// Rows are K, and the 64 columns are M or N; the next 64 columns are `tile_bytes` further. The next 16
// rows are 2048 bytes further.
DEV u64 descriptor_mn_major(u32 smem, u32 tile_bytes) {
  return (u64)((smem & 0x3ffff) >> 4) | (u64)(tile_bytes >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
