// Clusters: blocks on neighbouring SMs that reach each other's shared memory. (PTX ISA 7.8; Hopper and later.)
//
//   -DCLUSTER=n   blocks in a cluster, up to 8, neighbours in x; 1: none, on any architecture
//
// A kernel says __cluster_dims__ by CLUSTER_DIMS; its grid is a multiple of CLUSTER. In the emulator the
// blocks of a cluster share static shared memory: use dynamic.
#pragma once
#include "common/dtype.cuh"

#if CLUSTER > 1 && !defined(SLUICE_EMULATE)
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

// A barrier for all threads of the cluster's blocks, which have written nothing for each other but mbarriers
// (behind mbarrier_init_fence): it does not wait for the memory.
DEV void cluster_meet() {
#if CLUSTER == 1
  __syncthreads();
#elif defined(SLUICE_EMULATE)
  emu::sync_cluster();
#else
  __syncwarp();  // `aligned` wants all lanes at once
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
