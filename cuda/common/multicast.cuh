// Copies into the shared memory of all blocks of a cluster at once: what they have in common is read from L2
// one time. (PTX ISA 8.0, cp.async.bulk.tensor with .multicast::cluster; Hopper.)
#pragma once
#include "common/sm90.cuh"

// As tma_load_2d, to the same place of blocks 0 ... BLOCKS - 1 of the cluster; the mbarrier at this address in
// each of them counts the bytes that arrive there. All of them must have started, have read what was there
// before, and not end before they have waited.
template <int BLOCKS> DEV void tma_multicast_2d(u32 smem, const TensorMap* map, u32 barrier, int x, int y) {
#ifdef SLUICE_EMULATE
  for (int rank = 0; rank < BLOCKS; rank++) emulated_load_to(rank, smem, map, barrier, x, y, 0);
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;"
      :: "r"(smem), "l"(map), "r"(barrier), "r"(x), "r"(y), "h"((u16)((1 << BLOCKS) - 1)) : "memory");
#endif
}
