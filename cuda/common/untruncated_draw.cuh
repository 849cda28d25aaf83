// The draw of a row of which no token is removed: sample_slices notes each slice's rivals, sample_rows
// finds the winner among them. cuda/sample.cu tells the plan.
//
// The rivals of a slice are the tokens whose upper bounds of the score come near the highest one of the
// slice. Exact scores are computed of those that come near the highest of the row. No other token can win
// unless the best of these scores is further below that highest bound: so it is in some percent of rows
// with one likely token, when that has little luck. Then the slices that may have a better token are
// searched for it; and always those with more rivals than can be noted.
#pragma once
#include "common/dtype.cuh"
#include "common/philox.cuh"
#include "common/sampling_row.cuh"
#include "common/select.cuh"

// What sample_slices finds out about a slice.
struct Part {
  u64 best;       // rank of the best token, before temperature; NaN or +infinity: the logits have it
  float highest;  // finite upper bound of a score, if the slice has rivals; see upper_score
  u32 num_rivals; // MAX_RIVALS at most are noted
  float mass;     // of all tokens, relative to the slice's best
};
static_assert(sizeof(Part) == 24, "engine/ops/sample_cuda.py allocates them");

struct Rival {
  float upper;  // bound of its score
  u32 id;
};

constexpr int GROUPS_PER_SLICE = SLICE / GROUP;
constexpr int MAX_RIVALS = GROUPS_PER_SLICE * sizeof(u32) / sizeof(Rival);
constexpr float LISTED = 2.f;  // below the highest bound: seldom more tokens than can be noted

// They take the place of the slice's groups.
template <class Word>
DEV auto rivals_of_slice(Word* groups, int row, int slice, int num_slices) {
  return (Rival*)(groups + ((i64)row * num_slices + slice) * GROUPS_PER_SLICE);
}

DEV Score block_best(Score score, Score (&shared)[MAX_WARPS]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  score = warp_best(score);
  if (lane == 0) shared[warp] = score;
  __syncthreads();
  return warp_best(shared[lane % (ROW_THREADS / 32)]);
}

// The better of `score` and the scores of a slice's tokens whose bounds are at least `reach`.
DEV Score search_slice(Score score, const Row& row, int slice, float reach) {
  static_assert(SLICE == ROW_THREADS * OCTET);
  const int first = slice * SLICE + threadIdx.x * OCTET;
  const float scale = row.score_scale();
  const Words words = philox(row.params->seed, first / OCTET, row.position, COARSE_STREAM);
  float x[OCTET];
  u32 rivals = 0;
  row.edited_octet(first, x);
#pragma unroll
  for (int e = 0; e < OCTET; e++) {
    const bool is_rival = !(upper_score(x[e], scale, coarse_of(words, e)) < reach);
    if (is_rival && x[e] > -infinity()) rivals |= 1u << e;
  }
#pragma unroll 1
  for (; rivals; rivals &= rivals - 1) {
    const int e = __ffs(rivals) - 1;
    score = better(score, row.score_of(element(x, e), first + e));
  }
  return score;
}

// For a block of ROW_THREADS. `best` is the best tempered logit.
DEV u32 draw_from_all(const Row& row, const Part* parts, int num_slices, const Rival* rivals,
                      float best) {
  __shared__ Score shared_first[MAX_WARPS], shared_second[MAX_WARPS];
  const int lane = threadIdx.x % 32;
  float highest = -infinity();
  for (int i = lane; i < num_slices; i += 32) highest = fmaxf(highest, parts[i].highest);
  highest = warp_max(highest);

  Score score = {-(double)infinity(), 0xffffffffu};
  const bool is_plain = fabsf(best) < LARGEST_PLAIN;
  float reach = -infinity();
  if (is_plain) {
#pragma unroll 1
    for (int i = threadIdx.x; i < num_slices * MAX_RIVALS; i += ROW_THREADS) {
      const int slice = i % num_slices, place = i / num_slices;  // most slices have a few
      if (place >= parts[slice].num_rivals) continue;
      const Rival rival = rivals[slice * MAX_RIVALS + place];
      if (!(rival.upper >= highest - LISTED)) continue;
      float x[OCTET];
      row.edited_octet(rival.id / OCTET * OCTET, x);
      const float logit = element(x, rival.id % OCTET);
      score = better(score, row.score_of(logit, rival.id));
    }
    score = block_best(score, shared_first);
    reach = upper_unit(score.value) - BOUND_SLACK - fabsf(highest) * BOUND_ERROR;
  }
  bool is_searched = false;
#pragma unroll 1
  for (int base = 0; base < num_slices; base += 32) {
    bool may_win = false;
    if (base + lane < num_slices) {
      const Part& part = parts[base + lane];
      may_win = !is_plain || part.num_rivals > MAX_RIVALS ||
                (highest - LISTED > reach && part.highest >= reach);
    }
    u32 searched = __ballot_sync(FULL_WARP, may_win);
#pragma unroll 1
    for (; searched; searched &= searched - 1) {
      score = search_slice(score, row, base + __ffs(searched) - 1, reach);
      is_searched = true;
    }
  }
  return is_searched ? block_best(score, shared_second).id : score.id;
}
