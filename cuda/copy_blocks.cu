// Copy whole blocks of a KV cache to other blocks, in all layers at once.
//
// Grid: (pairs, caches). A block of the cache is contiguous and a multiple of 16 bytes.
#include "common/dtype.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
copy_blocks(const u64* __restrict__ caches,  // [caches] addresses of their first blocks
            const i64* __restrict__ pairs,   // [pairs, 2] from, to
            i64 vecs_per_block) {            // of 16 bytes
  uint4* cache = (uint4*)caches[blockIdx.y];
  const uint4* from = cache + pairs[2 * blockIdx.x] * vecs_per_block;
  uint4* to = cache + pairs[2 * blockIdx.x + 1] * vecs_per_block;
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
