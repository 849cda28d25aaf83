// Order, sums and sorting for choosing among many numbers, exactly and always alike.
//
// Tokens are ordered by (value descending, id ascending). A rank puts that order into one integer, the
// larger the earlier. All functions called block_* need the whole block.
#pragma once
#include "common/dtype.cuh"

constexpr u32 FULL_WARP = 0xffffffffu;
constexpr int MAX_WARPS = 32;

// A float's bits made monotone as an unsigned integer; -0 and +0 have one key. Not for NaN.
DEV u32 ordered(float x) {
  const u32 bits = __float_as_uint(__fadd_rn(x, 0.f));
  return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}
DEV float from_ordered(u32 key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}
DEV u64 ranked(u32 key, u32 id) { return (u64)key << 32 | (0xffffffffu - id); }
DEV u32 rank_key(u64 rank) { return (u32)(rank >> 32); }
DEV u32 rank_id(u64 rank) { return 0xffffffffu - (u32)rank; }

// The larger one, or NaN if either is: the one NaN of which `ordered` makes the largest of all keys.
DEV float max_or_nan(float a, float b) {
#ifdef SLUICE_EMULATE
  return a != a || b != b ? __uint_as_float(0x7fffffffu) : a > b ? a : b;
#else
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#endif
}

DEV u64 warp_max_u64(u64 x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const u64 other = __shfl_xor_sync(FULL_WARP, x, step);
    x = other > x ? other : x;
  }
  return x;
}

// A token's score in the draw; of equal scores the lowest id wins.
struct Score {
  double value;
  u32 id;
};
DEV Score better(const Score& a, const Score& b) {
  return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}
DEV Score warp_best(Score score) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const Score other = {__shfl_xor_sync(FULL_WARP, score.value, step),
                         __shfl_xor_sync(FULL_WARP, score.id, step)};
    score = better(score, other);
  }
  return score;
}

DEV u64 warp_inclusive_sum(u64 x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u64 below = __shfl_up_sync(FULL_WARP, x, step);
    if (lane >= step) x += below;
  }
  return x;
}

// Where a running sum reaches a limit.
struct Crossing {
  int index;   // the first index up to and with which it does, -1 if none
  u64 before;  // the running sum before that index
  u64 total;   // of all, without the start
};
struct CrossingShared {
  u64 warp_sums[MAX_WARPS];
  u64 before;
  int index;
};

// Thread t brings the amounts of indices N t, ..., N t + N - 1; the sum runs on from `start`, which must
// be below `limit`. Integer sums, so that no order of adding could show.
template <int N>
DEV Crossing block_crossing(const u64 (&amounts)[N], u64 start, double limit, CrossingShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  u64 sum = 0;
#pragma unroll
  for (int j = 0; j < N; j++) sum += amounts[j];
  const u64 inclusive = warp_inclusive_sum(sum, lane);
  if (threadIdx.x == 0) shared.index = -1;
  if (lane == 31) shared.warp_sums[warp] = inclusive;
  __syncthreads();
  const u64 of_warps = warp_inclusive_sum(lane < num_warps ? shared.warp_sums[lane] : 0, lane);
  const u64 total = __shfl_sync(FULL_WARP, of_warps, 31);
  const u64 earlier = __shfl_sync(FULL_WARP, of_warps, warp > 0 ? warp - 1 : 0);
  u64 before = start + (warp > 0 ? earlier : 0) + inclusive - sum;
  if ((double)before < limit && (double)(before + sum) >= limit) {  // one thread at most
    bool is_found = false;
#pragma unroll
    for (int j = 0; j < N; j++) {
      if (!is_found && (double)(before + amounts[j]) >= limit) {
        is_found = true;
        shared.index = N * threadIdx.x + j;
        shared.before = before;
      }
      before += amounts[j];
    }
  }
  __syncthreads();
  const Crossing result = {shared.index, shared.before, total};
  __syncthreads();
  return result;
}

// Entries of a histogram, or of a list to be sorted, in shared memory: BINS / THREADS for each thread.
constexpr int BINS = 2048;

// The k-th largest of keys[0, n), 0 if there are fewer. For a block of THREADS.
template <int THREADS>
DEV u32 block_kth_largest(const u32* keys, int n, int k, u32 (&count)[BINS], CrossingShared& shared) {
  constexpr int PER_THREAD = BINS / THREADS;
  if (k > n) return 0;
  u32 prefix = 0, known = 0;
  u64 before = 0;
#pragma unroll 1
  for (int digit = 0; digit < 3; digit++) {  // the best digit comes first in the histogram
    const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0;
    const u32 digit_mask = digit == 2 ? 1023u : 2047u;
    for (int i = threadIdx.x; i < BINS; i += THREADS) count[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
      const u32 key = keys[i];
      if ((key & known) == prefix) atomicAdd(&count[digit_mask - (key >> shift & digit_mask)], 1u);
    }
    __syncthreads();
    u64 amounts[PER_THREAD];
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) amounts[j] = count[PER_THREAD * threadIdx.x + j];
    const Crossing crossing = block_crossing(amounts, before, k, shared);
    before = crossing.before;
    prefix |= (digit_mask - crossing.index) << shift;
    known |= digit_mask << shift;
  }
  return prefix;
}

// Sort list[0, n) descending. Entries up to the next power of two are overwritten.
DEV void block_sort_descending(u64* list, int n) {
  int size = 2;
  while (size < n) size *= 2;
  for (int i = n + threadIdx.x; i < size; i += blockDim.x) list[i] = 0;
  for (int width = 2; width <= size; width *= 2) {  // bitonic: Batcher 1968
    for (int step = width / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const int i = 2 * pair - (pair & (step - 1)), j = i + step;
        const u64 a = list[i], b = list[j];
        if ((a < b) == ((i & width) == 0)) {
          list[i] = b;
          list[j] = a;
        }
      }
    }
  }
  __syncthreads();
}
