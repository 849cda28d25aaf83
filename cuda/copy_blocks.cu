// Copy whole KV blocks, in all layers at once: within a cache, or between it and pinned host memory.
//
// Grid: (pairs, caches). A block is contiguous and a multiple of 16 bytes. Host memory is read and
// written in place, over the bus: with so many threads its latency is hidden, and thousands of pieces
// need one launch, where the copy engines would take a call of the driver for each.
#include "common/dtype.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
copy_blocks(const u64* __restrict__ sources,  // [caches] addresses of their first blocks
            const u64* __restrict__ targets,  // [caches]
            const i64* __restrict__ pairs,    // [pairs, 2] from, to
            i64 vecs_per_block) {             // of 16 bytes
  const uint4* from = (const uint4*)sources[blockIdx.y] + pairs[2 * blockIdx.x] * vecs_per_block;
  uint4* to = (uint4*)targets[blockIdx.y] + pairs[2 * blockIdx.x + 1] * vecs_per_block;
  for (i64 i = threadIdx.x; i < vecs_per_block; i += 4 * THREADS) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (i + j * THREADS < vecs_per_block) v[j] = from[i + j * THREADS];
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (i + j * THREADS < vecs_per_block) to[i + j * THREADS] = v[j];
    }
  }
}
