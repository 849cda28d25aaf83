// How sample_rows finds the few best tokens of a row, and draws from them: for a block of ROW_THREADS.
//
// Which value so many tokens reach is read off a histogram of the groups' largest logits, by their distance
// from the best one. Its buckets get wider with the distance, 32 for each power of two, so that flat and
// steep rows are told alike: about an eighth more tokens come than asked for.
#pragma once
#include "common/dtype.cuh"
#include "common/philox.cuh"
#include "common/sampling_row.cuh"
#include "common/select.cuh"

constexpr int MAX_GROUPS = 8192;
constexpr int BUCKETS = 2 * ROW_THREADS;               // distances from 2**-12 to 2**20
constexpr int BUCKET_SHIFT = 18, FIRST_BUCKET = (127 - 12) << (23 - BUCKET_SHIFT);
constexpr double MASS_UNITS = 1099511627776.0;         // 2**40 for a weight of 1

DEV int bucket_of(float distance) {
  const int bucket = (int)(__float_as_uint(distance) >> BUCKET_SHIFT) - FIRST_BUCKET;
  return min(max(bucket, 0), BUCKETS - 1);
}

// A value that is not above any whose distance from `best` is in the bucket or in one before it.
DEV float below_bucket(float best, int bucket) {
  if (bucket == BUCKETS - 1) return -infinity();
  const float edge = __uint_as_float((u32)(bucket + 1 + FIRST_BUCKET) << BUCKET_SHIFT);
  return best - edge * 1.00001f - fabsf(best) * 1e-6f;  // far more than rounding takes
}

// A value that is not above any whose tempered value is at least that of `x`.
DEV float just_below(float x) { return x - (fabsf(x) * 9.5367432e-7f + 1e-37f); }

struct BucketShared {
  u32 count[BUCKETS];
  u32 warp_counts[ROW_THREADS / 32];
  int found;
};

// The first bucket up to and with which `wanted` are counted, the last one if they are fewer.
// Thread 0 has set `found` to BUCKETS - 1, before a barrier or by the time of the call.
DEV int block_bucket(u32 wanted, BucketShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 own = shared.count[2 * threadIdx.x], both = own + shared.count[2 * threadIdx.x + 1];
  u32 sum = both;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 earlier = __shfl_up_sync(FULL_WARP, sum, step);
    if (lane >= step) sum += earlier;
  }
  if (lane == 31) shared.warp_counts[warp] = sum;
  __syncthreads();
  const u32 before =
      __reduce_add_sync(FULL_WARP, lane < warp ? shared.warp_counts[lane] : 0u) + sum - both;
  if (before < wanted && before + both >= wanted) {  // one thread at most
    shared.found = 2 * threadIdx.x + (before + own >= wanted ? 0 : 1);
  }
  __syncthreads();
  return shared.found;
}

constexpr u32 NONE = 0xffffffffu;
