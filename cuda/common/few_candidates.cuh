// How sample_rows finds the few best tokens of a row, and draws from them: for a block of ROW_THREADS.
//
// Which value so many tokens reach is read off a histogram of the groups' largest logits, by their distance
// from the best one. Its buckets get wider with the distance, 32 for each power of two, so that flat and
// steep rows are told alike: about an eighth more tokens come than asked for.
//
// Few candidates need no sort. What is better than each is counted and weighed by comparing all with all,
// while some of the threads compute the candidates' scores; then each token's thread knows whether min_p,
// top_k and top_p keep it.
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

constexpr int FEW = 128;
constexpr int SCORERS = FEW, COUNTERS = (ROW_THREADS - SCORERS) / FEW;  // threads; for each candidate

struct Candidates {
  u64 rank[FEW], weight[FEW];
};

struct FewShared {
  u32 better[COUNTERS][FEW];
  u64 weight_of_better[COUNTERS][FEW];
  u64 weight[SCORERS / 32];
  Score score[SCORERS / 32];
};

constexpr u32 NONE = 0xffffffffu;

// Of all tokens' weights, not of those at hand: `amount` is negative if it is not known, and may be wrong by
// `error`, relative to it. So a nucleus that ends by it ends somewhere between two limits, and a token drawn
// counts only if it comes before both.
struct RowMass {
  double amount, error;

  DEV double highest() const { return amount * (1. + error); }
  DEV double lowest() const { return amount * (1. - error); }
};

// Draw from what top_k and top_p leave of `count` candidates, the best tokens of the row that min_p leaves.
// `is_complete`: these are all that top_k has to choose from. NONE: more candidates are needed, or all.
DEV u32 draw_from_few(const Row& row, const Candidates& candidates, int count, bool is_complete,
                      const RowMass& mass, FewShared& shared) {
  const RowParams& params = *row.params;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = threadIdx.x % FEW;
  Score score = {-(double)infinity(), NONE};
  if (i < count) {
    const u64 rank = candidates.rank[i];
    if (threadIdx.x < SCORERS) {
      score.id = rank_id(rank);
      score.value = (double)from_ordered(rank_key(rank)) +
                    token_noise(params.seed, row.position, score.id);
    } else {
      const int part = (threadIdx.x - SCORERS) / FEW;
      u32 better = 0;
      u64 weight = 0;
#pragma unroll 4
      for (int other = part; other < count; other += COUNTERS) {
        const bool is_better = candidates.rank[other] > rank;
        better += is_better;
        weight += is_better ? candidates.weight[other] : 0;
      }
      shared.better[part][i] = better;
      shared.weight_of_better[part][i] = weight;
    }
  }
  __syncthreads();
  bool is_left = false;
  u64 before = 0;
  if (threadIdx.x < SCORERS) {
    if (i < count) {
      u32 better = 0;
#pragma unroll
      for (int part = 0; part < COUNTERS; part++) {
        better += shared.better[part][i];
        before += shared.weight_of_better[part][i];
      }
      is_left = params.top_k == 0 || better < params.top_k;
    }
    u64 weight = is_left ? candidates.weight[i] : 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) weight += __shfl_xor_sync(FULL_WARP, weight, step);
    if (lane == 0) shared.weight[warp] = weight;
  }
  __syncthreads();
  u64 total = 0;
#pragma unroll
  for (int w = 0; w < SCORERS / 32; w++) total += shared.weight[w];
  const double limit = params.top_p * (is_complete ? (double)total : mass.highest());
  const double certain = is_complete ? limit : params.top_p * mass.lowest();
  const bool tells =
      is_complete || (params.top_p < 1 && mass.amount >= 0 && (double)total >= limit);
  if (!tells) return NONE;
  if (threadIdx.x < SCORERS) {
    const bool is_kept = is_left && (params.top_p >= 1 || (double)before < limit);
    const bool is_uncertain = params.top_p < 1 && !((double)before < certain);
    score.id = 2 * score.id + is_uncertain;  // which leaves the ids in order
    if (!is_kept) score = {-(double)infinity(), NONE};
    score = warp_best(score);
    if (lane == 0) shared.score[warp] = score;
  }
  __syncthreads();
  score = shared.score[0];
#pragma unroll
  for (int w = 1; w < SCORERS / 32; w++) score = better(score, shared.score[w]);
  return score.id & 1 ? NONE : score.id / 2;
}
