// Clusters: blocks on neighbouring SMs that read each other's shared memory. (PTX ISA 7.8; Hopper and later.)
//
//   -DCLUSTER=n   blocks in a cluster, up to 8, neighbours in x; 1: none, on any architecture
//
// A kernel says __cluster_dims__ by CLUSTER_DIMS; its grid is a multiple of CLUSTER. In the emulator the
// blocks of a cluster share static shared memory: use dynamic.
#pragma once
#include "common/async_copy.cuh"

#if CLUSTER > 1 && !defined(SLUICE_EMULATE)
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

// A barrier for all threads of the cluster's blocks: what they wrote before is seen by all after it. A block
// that others read from must not end before a barrier that follows their reads.
DEV void cluster_sync() {
#if CLUSTER == 1
  __syncthreads();
#elif defined(SLUICE_EMULATE)
  emu::sync_cluster();
#else
  __syncwarp();  // `aligned` wants all lanes at once
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The same for blocks that have written nothing for each other but mbarriers (behind mbarrier_init_fence), or
// that only must not end yet: it does not wait for the memory.
DEV void cluster_meet() {
#if CLUSTER == 1 || defined(SLUICE_EMULATE)
  cluster_sync();
#else
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// What lies at `address`, of this block's dynamic shared memory, in block `rank` of the cluster.
DEV float4 load_float4_of_block(smem_t address, int rank) {
#if defined(SLUICE_EMULATE)
  return *(const float4*)emu::in_block_of_cluster((const void*)address, rank);
#else
  float4 v;
#if CLUSTER == 1
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
#else
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
               "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address), "r"(rank) : "memory");
#endif
  return v;
#endif
}
