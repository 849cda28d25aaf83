// What sm90.cuh offers, in plain C++ for the emulator (tests/kernels/cuda_emu.h). Products take place when
// they are started, copies as well or, with -DEMU_LATE=1, when nothing else can: the one finds stages that are
// overwritten too early, the other stages that are read too early. Both check addresses, swizzles, layouts and
// that every wait ends.
#pragma once
#include "common/dtype.cuh"

#ifdef SLUICE_EMULATE

// Addresses are offsets from the start of dynamic shared memory.
DEV u8* shared_pointer(u32 smem) { return (u8*)emu::dynamic_shared() + smem; }
DEV u32 shared_address(const void* p) { return (u32)((const u8*)p - shared_pointer(0)); }
DEV void store_zeros_16(u32 smem) { __builtin_memset(shared_pointer(smem), 0, 16); }

// Of bytes in a tile of rows of 128: the chunk's number is combined with the row's.
DEV u32 swizzled_offset(u32 smem) { return smem ^ (smem >> 7 & 7) << 4; }
DEV u8* swizzled(u32 smem) { return shared_pointer(swizzled_offset(smem)); }

struct EmulatedMbarrier {
  u8 expected, pending, phase, unused;
  int bytes;
  void settle() {
    emu::progress++;
    if (pending == 0 && bytes == 0) phase ^= 1, pending = expected;
  }
};
static_assert(sizeof(EmulatedMbarrier) == 8);
DEV EmulatedMbarrier& emulated_mbarrier(u32 smem) { return *(EmulatedMbarrier*)shared_pointer(smem); }
DEV EmulatedMbarrier& emulated_mbarrier_at(u32 smem, int rank) {
  return *(EmulatedMbarrier*)emu::in_block_of_cluster(shared_pointer(smem), rank);
}
DEV u32 rank_in_cluster() { return emu::current->home - emu::cluster; }

DEV void mbarrier_init(u32 barrier, u32 arrivals) {
  emulated_mbarrier(barrier) = {(u8)arrivals, (u8)arrivals, 0, 0, 0};
}
DEV void mbarrier_init_fence() {}
DEV void mbarrier_arrive_at(u32 barrier, u32 rank) {
  EmulatedMbarrier& b = emulated_mbarrier_at(barrier, rank);
  if (b.pending == 0) emu::fail("more arrivals at an mbarrier than it was initialised for");
  b.pending--;
  b.settle();
}
DEV void mbarrier_arrive(u32 barrier) { mbarrier_arrive_at(barrier, rank_in_cluster()); }
DEV void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  emulated_mbarrier(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}
DEV void mbarrier_wait(u32 barrier, u32 parity) {
  while (emulated_mbarrier(barrier).phase == parity) emu::yield();
}

struct EmulatedNamedBarrier { int arrived; u32 round; };
inline EmulatedNamedBarrier emulated_named_barriers[8][16];  // of the cluster's blocks
DEV EmulatedNamedBarrier& emulated_named_barrier(int id) { return emulated_named_barriers[rank_in_cluster()][id]; }

DEV void named_barrier_arrive(int id, int threads) {
  EmulatedNamedBarrier& b = emulated_named_barrier(id);
  emu::progress++;
  if (++b.arrived == threads) b.arrived = 0, b.round++;
}
DEV void named_barrier_sync(int id, int threads) {
  const u32 round = emulated_named_barrier(id).round;
  named_barrier_arrive(id, threads);
  while (emulated_named_barrier(id).round == round) emu::yield();
}

// Innermost dimension first; strides in bytes, of the second and third dimension.
struct alignas(64) TensorMap { u64 address, extent[3], stride[2], box[3], unused[7]; };

DEV void emulated_load(EmulatedMbarrier& barrier, u8* memory, u32 smem, const TensorMap* map, int x, int y, int z) {
  const u64 rows = map->box[1], planes = map->box[2];
  for (u64 r = 0; r < rows * planes; r++) {
    for (u64 c = 0; c < map->box[0]; c++) {
      const i64 at[3] = {(i64)(x + c), (i64)(y + r % rows), (i64)(z + r / rows)};
      bool inside = true;
      for (int d = 0; d < 3; d++) inside &= at[d] >= 0 && at[d] < (i64)map->extent[d];
      u16 value = 0;
      if (inside)
        __builtin_memcpy(&value, (u8*)map->address + at[0] * 2 + at[1] * map->stride[0] + at[2] * map->stride[1], 2);
      __builtin_memcpy(memory + swizzled_offset(smem + r * 128 + c * 2), &value, 2);
    }
  }
  barrier.bytes -= (int)(rows * planes * map->box[0] * 2);
  barrier.settle();
}
DEV void emulated_load_to(u32 rank, u32 smem, const TensorMap* map, u32 barrier, int x, int y, int z) {
  EmulatedMbarrier& b = emulated_mbarrier_at(barrier, rank);
  u8* memory = (u8*)emu::in_block_of_cluster(shared_pointer(0), rank);
  emu::later([=, &b, copy = *map] { emulated_load(b, memory, smem, &copy, x, y, z); });
}
DEV void tma_load_2d(u32 smem, const TensorMap* map, u32 barrier, int x, int y) {
  emulated_load_to(rank_in_cluster(), smem, map, barrier, x, y, 0);
}
DEV void tma_load_3d(u32 smem, const TensorMap* map, u32 barrier, int x, int y, int z) {
  emulated_load_to(rank_in_cluster(), smem, map, barrier, x, y, z);
}
DEV void tensor_map_prefetch(const TensorMap*) {}
DEV void fence_async_proxy() {}

template <int REGISTERS> DEV void registers_take() {}
template <int REGISTERS> DEV void registers_give() {}

DEV void wgmma_fence() {}
DEV void wgmma_commit() {}
template <int PENDING> DEV void wgmma_wait() { __syncwarp(); }  // a warp's part is done as a whole

template <int SIZE> DEV void wgmma_results(float (&)[SIZE]) {}

// Element of an operand by its descriptor: `row` of M or N, `k`.
DEV float emulated_element(u64 descriptor, bool k_major, int row, int k) {
  const u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const u32 stride = (descriptor >> 32 & 0x3fff) << 4;
  u16 bits;
  __builtin_memcpy(&bits, swizzled(k_major ? start + row / 8 * stride + row % 8 * 128 + k * 2
                                           : start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2), 2);
  return to_float(bits);
}

template <class A>
DEV void emulated_wgmma(float* d, int size, A a, u64 b, bool b_k_major, int accumulate) {
  const int t = threadIdx.x & 3;
  for (int i = 0; i < size; i++) {
    const int column = i / 4 * 8 + t * 2 + (i & 1), lower = i >> 1 & 1;
    float sum = accumulate ? d[i] : 0.f;
    for (int k = 0; k < 16; k++) sum += a[lower][k] * emulated_element(b, b_k_major, column, k);
    d[i] = sum;
  }
}

template <int SIZE> DEV void wgmma_ss(float (&d)[SIZE], u64 a, u64 b, int accumulate) {
  const int row = (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7);
  float rows[2][16];  // row, and the one 8 below
  for (int i = 0; i < 32; i++) rows[i / 16][i % 16] = emulated_element(a, true, row + i / 16 * 8, i % 16);
  emulated_wgmma(d, SIZE, rows, b, true, accumulate);
}
template <int SIZE> DEV void wgmma_rs(float (&d)[SIZE], const u32 (&a)[4], u64 b, int accumulate) {
  const int first_lane = threadIdx.x & 28;
  float rows[2][16];
  for (int lower = 0; lower < 2; lower++)
    for (int half = 0; half < 2; half++)
      for (int t = 0; t < 4; t++) {
        float* to = &rows[lower][8 * half + 2 * t];
        unpack2(__shfl_sync(~0u, a[2 * half + lower], first_lane + t), to[0], to[1]);
      }
  emulated_wgmma(d, SIZE, rows, b, false, accumulate);
}

#endif
