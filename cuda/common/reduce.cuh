// Sums and maxima over the lanes of a warp and the threads of a block.
//
// The order of operations depends on the number of threads alone, so a row's result does not depend on
// which block it lands in. All lanes of a warp, or all threads of a block, must call together.
#pragma once
#include "common/dtype.cuh"

// Over aligned groups of WIDTH lanes, a power of two; every lane gets its group's result.
template <int WIDTH = 32>
DEV float warp_sum(float x) {
#pragma unroll
  for (int step = WIDTH / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
template <int WIDTH = 32>
DEV float warp_max(float x) {
#pragma unroll
  for (int step = WIDTH / 2; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  }
  return x;
}

// Over a block of NUM_THREADS, a multiple of 32; every thread gets the result. `shared` has a float for
// each warp; a second call may reuse it only after another __syncthreads().
template <int NUM_THREADS>
DEV float block_sum(float x, float* shared) {
  constexpr int WARPS = NUM_THREADS / 32;
  x = warp_sum(x);
  if constexpr (WARPS > 1) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = warp_sum(lane < WARPS ? shared[lane] : 0.f);  // every warp adds the same numbers
  }
  return x;
}
template <int NUM_THREADS>
DEV float block_max(float x, float* shared) {
  constexpr int WARPS = NUM_THREADS / 32;
  x = warp_max(x);
  if constexpr (WARPS > 1) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = warp_max(lane < WARPS ? shared[lane] : -__int_as_float(0x7f800000));
  }
  return x;
}
