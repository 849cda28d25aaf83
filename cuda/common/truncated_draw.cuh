// The draw of sample_rows for a row that min_p, top_k or top_p leaves only some tokens: which, and which
// one. cuda/sample.cu tells the plan. For a block of ROW_THREADS.
#pragma once
#include "common/dtype.cuh"
#include "common/few_candidates.cuh"
#include "common/philox.cuh"
#include "common/reduce.cuh"
#include "common/select.cuh"
#include "common/sampling_row.cuh"
#include "common/untruncated_draw.cuh"

constexpr int LIST = BINS;  // tokens that can be sorted
constexpr int PER_THREAD = BINS / ROW_THREADS;
constexpr float BINS_PER_UNIT = 64.f;  // of the first histogram, over the distance from the best logit

// Candidates to ask for: top_k, or this many for top_p and min_p alone, and more if they do not tell.
constexpr int TOP_P_BUDGET = 64, BUDGET_GROWTH = 4, MAX_BUDGET = 1024;

struct Histogram {
  u32 count[BINS], mass_low[BINS], mass_high[BINS];
};

struct RowShared {
  union {
    Histogram histogram;
    u16 groups[MAX_GROUPS];  // those to be read again
    FewShared few;           // when they have been read
  };
  union {
    u64 list[LIST];  // ranks
    Candidates candidates;
  };
  BucketShared buckets;
  CrossingShared crossing;
  float reach[MAX_WARPS];
  Score score[MAX_WARPS];
  u32 num_groups, num_listed, found_id;

  DEV void start_listing() {
    num_groups = num_listed = 0;
    buckets.found = BUCKETS - 1;
  }
};

// The largest logits of a row's groups, ordered; those of thread t are of groups t, t + ROW_THREADS, ...
// A key of 0, which no number has: there is no such group.
constexpr int KEYS_PER_THREAD = MAX_GROUPS / ROW_THREADS;
struct GroupKeys {
  u32 key[KEYS_PER_THREAD];
};
DEV GroupKeys load_keys(const u32* groups, int num_groups) {
  GroupKeys keys;
#pragma unroll
  for (int j = 0; j < KEYS_PER_THREAD; j++) {
    const int group = j * ROW_THREADS + threadIdx.x;
    keys.key[j] = group < num_groups ? groups[group] : 0;
  }
  return keys;
}

// The row in sample_rows, with tempered logits relative to their best.
struct Cutter {
  const Row& row;
  float best;
  RowShared& shared;

  DEV static float logit_of(u64 rank) { return from_ordered(rank_key(rank)); }

  // Weight in units of 2**-40.
  DEV u64 weight(float x) const { return (u64)(expf(x - best) * (float)MASS_UNITS); }

  // f(tempered logit, id) for all tokens; the next logits are on their way meanwhile.
  template <class F>
  DEV void for_each_token(F f) const {
    constexpr int STRIDE = ROW_THREADS * OCTET, AHEAD = 2;
    float next[AHEAD][OCTET];
    const int start = threadIdx.x * OCTET;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      raw_octet(row.logits, start + i * STRIDE, row.vocab_size, row.is_aligned, next[i]);
    }
#pragma unroll 1
    for (int base = start; base < row.vocab_size; base += AHEAD * STRIDE) {
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const int first = base + i * STRIDE;
        float x[OCTET];
#pragma unroll
        for (int e = 0; e < OCTET; e++) x[e] = next[i][e];
        raw_octet(row.logits, first + AHEAD * STRIDE, row.vocab_size, row.is_aligned, next[i]);
        row.edit(first, x);
#pragma unroll
        for (int e = 0; e < OCTET; e++) f(row.tempered(x[e]), first + e);
      }
    }
  }

  DEV void clear_list() {
    if (threadIdx.x == 0) shared.num_listed = 0;
    __syncthreads();
  }
  DEV void push(u64 rank) {
    const u32 place = atomicAdd(&shared.num_listed, 1u);
    if (place < LIST) shared.list[place] = rank;
  }

  // List the tokens of at least the tempered value `reached`, of which none is below `lowest` before
  // temperature.
  DEV void list_candidates(const GroupKeys& keys, float lowest, float reached) {
#pragma unroll
    for (int j = 0; j < KEYS_PER_THREAD; j++) {
      if (keys.key[j] == 0 || !(from_ordered(keys.key[j]) >= lowest)) continue;
      shared.groups[atomicAdd(&shared.num_groups, 1u)] = (u16)(j * ROW_THREADS + threadIdx.x);
    }
    __syncthreads();
    const int num_octets = shared.num_groups * (GROUP / OCTET);
#pragma unroll 1
    for (int i = threadIdx.x; i < num_octets; i += ROW_THREADS) {
      const int first = shared.groups[i / (GROUP / OCTET)] * GROUP + i % (GROUP / OCTET) * OCTET;
      if (first >= row.vocab_size) continue;
      float x[OCTET];
      row.edited_octet(first, x);
#pragma unroll
      for (int e = 0; e < OCTET; e++) {
        if (!(x[e] >= lowest)) continue;
        const float tempered = row.tempered(x[e]);
        if (tempered >= reached && tempered > -infinity()) push(ranked(ordered(tempered), first + e));
      }
    }
    __syncthreads();
  }

  // With the candidates listed, sorted: how many of them are kept at most, or 0 if they do not tell; and how
  // many for certain.
  struct Kept {
    int most, certain;
  };
  DEV Kept kept_candidates(int num_listed, bool is_complete, const RowMass& mass) {
    const RowParams& params = *row.params;
    const int left = params.top_k > 0 ? min(num_listed, params.top_k) : num_listed;
    if (params.top_p >= 1) return is_complete ? Kept{left, left} : Kept{0, 0};
    if (!is_complete && mass.amount < 0) return {0, 0};
    const int first = PER_THREAD * threadIdx.x;
    u64 amounts[PER_THREAD];
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
      amounts[j] = first + j < left ? weight(logit_of(shared.list[first + j])) : 0;
    }
    auto num_kept = [&](double limit) {  // 0: they do not reach it
      return block_crossing(amounts, 0, limit, shared.crossing).index + 1;
    };
    if (is_complete) {
      const u64 total = block_crossing(amounts, 0, infinity(), shared.crossing).total;
      const int kept = num_kept(params.top_p * (double)total);
      return {kept, kept};
    }
    return {num_kept(params.top_p * mass.highest()), num_kept(params.top_p * mass.lowest())};
  }

  // --- The general way, over the whole row ---

  DEV int distance_bin(float x) const {
    return (int)fminf((best - x) * BINS_PER_UNIT, (float)(BINS - 1));
  }

  // Rank of the last token kept of those with a rank of at least `cut`: the first at which the number
  // of tokens (top_k), or their weight as a share of all (top_p), reaches `amount`.
  DEV u64 narrow_cut(u64 cut, bool by_mass, double amount) {
    Histogram& histogram = shared.histogram;
    double limit = amount;
    u64 start = 0;
    int members = 0;
    int bin = -1;
    u32 prefix = 0, known = 0;
    const int own = PER_THREAD * threadIdx.x;
    u64 amounts[PER_THREAD];
    auto is_member = [&](float x, u64 rank) {
      return rank >= cut && (bin < 0 || distance_bin(x) == bin) && (rank_key(rank) & known) == prefix;
    };
#pragma unroll 1
    for (int level = 0; level < 4; level++) {  // the distance, then the digits of the key
      const int shift = level == 1 ? 21 : level == 2 ? 10 : 0;
      const u32 digit_mask = level == 3 ? 1023u : 2047u;
      for (int i = threadIdx.x; i < BINS; i += ROW_THREADS) {
        histogram.count[i] = histogram.mass_low[i] = histogram.mass_high[i] = 0;
      }
      __syncthreads();
      for_each_token([&](float x, int id) {
        const u64 rank = ranked(ordered(x), id);
        if (!is_member(x, rank)) return;
        const int place = level == 0 ? distance_bin(x)
                                     : digit_mask - (rank_key(rank) >> shift & digit_mask);
        atomicAdd(&histogram.count[place], 1u);
        if (!by_mass) return;
        const u64 w = weight(x);
        const u32 low = (u32)w, old = atomicAdd(&histogram.mass_low[place], low);
        const u32 high = (u32)(w >> 32) + (old + low < old);
        if (high) atomicAdd(&histogram.mass_high[place], high);
      });
      __syncthreads();
#pragma unroll
      for (int j = 0; j < PER_THREAD; j++) {
        amounts[j] = by_mass ? (u64)histogram.mass_high[own + j] << 32 | histogram.mass_low[own + j]
                             : histogram.count[own + j];
      }
      if (by_mass && level == 0) {
        limit = amount * (double)block_crossing(amounts, 0, infinity(), shared.crossing).total;
      }
      const Crossing crossing = block_crossing(amounts, start, limit, shared.crossing);
      if (crossing.index < 0) return cut;  // fewer tokens than top_k
      start = crossing.before;
      members = (int)histogram.count[crossing.index];
      if (level == 0) {
        bin = crossing.index;
      } else {
        prefix |= (digit_mask - crossing.index) << shift;
        known |= digit_mask << shift;
      }
      __syncthreads();  // the histogram is cleared next
      if (members <= LIST) break;
    }
    if (members > LIST) return last_of_equals(prefix, by_mass, start, limit);

    clear_list();
    for_each_token([&](float x, int id) {
      const u64 rank = ranked(ordered(x), id);
      if (is_member(x, rank)) push(rank);
    });
    __syncthreads();
    block_sort_descending(shared.list, members);
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
      if (own + j >= members) {
        amounts[j] = 0;
      } else {
        amounts[j] = by_mass ? weight(logit_of(shared.list[own + j])) : 1;
      }
    }
    const Crossing last = block_crossing(amounts, start, limit, shared.crossing);
    return shared.list[last.index];
  }

  // The same among tokens that all have `key`: so many of the lowest ids are kept as it takes.
  DEV u64 last_of_equals(u32 key, bool by_mass, u64 start, double limit) {
    const u64 each = by_mass ? weight(from_ordered(key)) : 1;
    u64 wanted = (u64)((limit - (double)start) / (double)each);
    while ((double)(start + wanted * each) < limit) wanted++;
    while (wanted > 1 && (double)(start + (wanted - 1) * each) >= limit) wanted--;
    u64 seen = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < row.vocab_size; chunk += ROW_THREADS * OCTET) {
      const int first = chunk + threadIdx.x * OCTET;
      float x[OCTET];
      u32 equal = 0;
      row.tempered_octet(first, x);
#pragma unroll
      for (int e = 0; e < OCTET; e++) equal |= (ordered(x[e]) == key ? 1u : 0u) << e;
      const u64 amounts[1] = {(u64)__popc(equal)};
      const Crossing crossing = block_crossing(amounts, seen, (double)wanted, shared.crossing);
      if (crossing.index >= 0) {
        if (crossing.index == (int)threadIdx.x) {
          for (u64 passed = crossing.before + 1; passed < wanted; passed++) equal &= equal - 1;
          shared.found_id = first + __ffs(equal) - 1;
        }
        break;
      }
      seen += crossing.total;
    }
    __syncthreads();
    return ranked(key, shared.found_id);
  }

  // --- The draw ---

  DEV float block_reach(float certain) {
    certain = warp_max(certain);
    if (threadIdx.x % 32 == 0) shared.reach[threadIdx.x / 32] = certain;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    return warp_max(lane < ROW_THREADS / 32 ? shared.reach[lane] : -infinity()) - ESTIMATE_TO_BOUND - BOUND_SLACK;
  }

  // Of list[0, count), all that is left: strike out what cannot win.
  DEV void strike_out(int count) {
    float estimate[PER_THREAD], certain = -infinity();
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
      const int i = j * ROW_THREADS + threadIdx.x;
      if (i >= count) continue;
      const u64 rank = shared.list[i];
      const u32 coarse = coarse_bits(row.params->seed, row.position, rank_id(rank));
      const float distance = logit_of(rank) - best;
      estimate[j] = distance + noise_estimate(coarse);
      if (coarse == 0) estimate[j] = infinity();  // no bound worth having
      certain = fmaxf(certain, distance + least_noise(coarse));
    }
    const float reach = block_reach(certain);
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
      const int i = j * ROW_THREADS + threadIdx.x;
      if (i < count && estimate[j] < reach) shared.list[i] = 0;
    }
  }

  // The best lower bound of a score among the tokens with a rank of at least `cut` in some of the octets.
  DEV float reach_of_row(u64 cut, int stride) {
    float highest = -infinity(), at_highest = 0.f;
    u32 coarse_highest = 0;
#pragma unroll 1
    for (int first = threadIdx.x * OCTET; first < row.vocab_size; first += stride) {
      float x[OCTET];
      row.tempered_octet(first, x);
      const Words words = philox(row.params->seed, first / OCTET, row.position, COARSE_STREAM);
#pragma unroll
      for (int e = 0; e < OCTET; e++) {
        if (ranked(ordered(x[e]), first + e) < cut) continue;
        const float distance = x[e] - best;
        const float estimate = distance + noise_estimate(coarse_of(words, e));
        if (estimate > highest) {
          highest = estimate;
          at_highest = distance;
          coarse_highest = coarse_of(words, e);
        }
      }
    }
    return block_reach(highest > -infinity() ? at_highest + least_noise(coarse_highest)
                                             : -infinity());
  }

  // List what can win of all tokens with a rank of at least `cut`; returns their number. Any tokens
  // bound the winner from below, so an eighth of the row is tried first, and all of it if that tells
  // too little. Then a handful is left: more than the list holds only if thousands of tokens have almost
  // the same luck.
  DEV int list_rivals(u64 cut) {
#pragma unroll 1
    for (int share = 8; share >= 1; share -= 7) {
      const float reach = reach_of_row(cut, share * ROW_THREADS * OCTET);
      clear_list();
#pragma unroll 1
      for (int first = threadIdx.x * OCTET; first < row.vocab_size; first += ROW_THREADS * OCTET) {
        float x[OCTET];
        row.tempered_octet(first, x);
        const Words words = philox(row.params->seed, first / OCTET, row.position, COARSE_STREAM);
#pragma unroll
        for (int e = 0; e < OCTET; e++) {
          const u64 rank = ranked(ordered(x[e]), first + e);
          const u32 coarse = coarse_of(words, e);
          const bool is_rival = coarse == 0 || x[e] - best + noise_estimate(coarse) >= reach;
          if (is_rival && rank >= cut) push(rank);
        }
      }
      __syncthreads();
      if (shared.num_listed <= LIST) break;
      __syncthreads();
    }
    return shared.num_listed;
  }

  // The one of list[0, count) with the largest logit + noise; 0: struck out.
  DEV u32 winner(int count) {
    Score score = {-(double)infinity(), 0xffffffffu};
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += ROW_THREADS) {
      const u64 rank = shared.list[i];
      if (rank == 0) continue;
      const double noise = token_noise(row.params->seed, row.position, rank_id(rank));
      score = better(score, {logit_of(rank) + noise, rank_id(rank)});
    }
    return best_of_block(score);
  }

  // The same of all tokens with a rank of at least `cut`.
  DEV u32 winner_of_row(u64 cut) {
    Score score = {-(double)infinity(), 0xffffffffu};
    for_each_token([&](float x, int id) {
      if (ranked(ordered(x), id) < cut) return;
      score = better(score, {x + token_noise(row.params->seed, row.position, id), (u32)id});
    });
    return best_of_block(score);
  }

  DEV u32 best_of_block(Score score) {
    score = warp_best(score);
    if (threadIdx.x % 32 == 0) shared.score[threadIdx.x / 32] = score;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    return warp_best(shared.score[lane < ROW_THREADS / 32 ? lane : 0]).id;
  }
};

// Of all tokens, relative to the best of the row; every warp adds the slices in the same order.
//
// Its error, in units of 2**-24: the definition rounds x / T and best / T, and we the slices' best, each by as
// much as |best| + 40 (what is further below does not count); differences and products of at most 40 are
// rounded 5 times; 8 are those of the exponentials, 35 of the sums, 8 of the weights' last bits. All that is
// below 4 |best| + 512. Where even that is much, the mass is not known.
DEV RowMass row_mass(const Row& row, const Part* parts, int num_slices, float best) {
  float mass = 0.f;
  for (int i = threadIdx.x % 32; i < num_slices; i += 32) {
    if (!(parts[i].mass > 0)) continue;
    mass += expf(row.tempered(from_ordered(rank_key(parts[i].best))) - best) * parts[i].mass;
  }
  const double error = (fabs((double)best) + 128.) * 2.384185791015625e-7;
  return {error < 0.25 ? (double)warp_sum(mass) * MASS_UNITS : -1., error};
}

// Try the best few tokens: the one drawn, or NONE if it takes more. `raw_best` is the best logit before
// temperature, `floor` the least tempered logit that min_p leaves.
DEV u32 draw_from_candidates(Cutter& cutter, const GroupKeys& keys, float raw_best, float floor,
                             const RowMass& mass) {
  const Row& row = cutter.row;
  RowShared& shared = cutter.shared;
#pragma unroll
  for (int j = 0; j < KEYS_PER_THREAD; j++) {
    if (keys.key[j] == 0) continue;
    atomicAdd(&shared.buckets.count[bucket_of(raw_best - from_ordered(keys.key[j]))], 1u);
  }
  __syncthreads();
  const float lowest_left = just_below(floor * row.temperature);
  int budget = row.params->top_k > 0 ? row.params->top_k : TOP_P_BUDGET;
#pragma unroll 1
  for (; budget <= MAX_BUDGET; budget *= BUDGET_GROWTH) {
    const float value = below_bucket(raw_best, block_bucket(budget, shared.buckets));
    const float reached = row.tempered(value);
    cutter.list_candidates(keys, fmaxf(just_below(value), lowest_left), fmaxf(reached, floor));
    const int num_listed = shared.num_listed;
    if (num_listed > LIST) break;
    const bool is_complete =
        row.params->top_k > 0 || !(reached > floor) || reached == -infinity();
    u32 token = NONE;
    if (num_listed <= FEW) {
      if (threadIdx.x < num_listed) {
        const u64 rank = shared.candidates.rank[threadIdx.x];
        shared.candidates.weight[threadIdx.x] = cutter.weight(Cutter::logit_of(rank));
      }
      __syncthreads();
      token = draw_from_few(row, shared.candidates, num_listed, is_complete, mass, shared.few);
    } else {
      block_sort_descending(shared.list, num_listed);
      const Cutter::Kept kept = cutter.kept_candidates(num_listed, is_complete, mass);
      if (kept.most > 0) {
        cutter.strike_out(kept.most);
        token = cutter.winner(kept.most);
      }
      for (int i = kept.certain; i < kept.most; i++) {
        if (rank_id(shared.list[i]) == token) token = NONE;
      }
    }
    if (token != NONE) return token;
    __syncthreads();
    if (threadIdx.x == 0) shared.start_listing();
  }
  return NONE;
}

// Of a row whose best logit is `raw_best`, and `best` when tempered.
DEV u32 draw_truncated(const Row& row, const Part* parts, int num_slices, const GroupKeys& keys,
                       float raw_best, float best, RowShared& shared) {
  Cutter cutter = {row, best, shared};
  const RowParams& params = *row.params;
  const float floor = __fadd_rn(best, params.log_min_p);
  const RowMass mass =
      row.flags & MASS ? row_mass(row, parts, num_slices, best) : RowMass{-1., 0.};
  const u32 token = draw_from_candidates(cutter, keys, raw_best, floor, mass);
  if (token != NONE) return token;
  // no token of -infinity, and none below the floor
  const u32 lowest = ordered(-infinity()) + 1, floor_key = ordered(floor);
  u64 cut = (u64)(floor_key > lowest ? floor_key : lowest) << 32;
#pragma unroll 1
  for (int by_mass = params.top_k > 0 ? 0 : 1; by_mass < (params.top_p < 1 ? 2 : 1); by_mass++) {
    cut = cutter.narrow_cut(cut, by_mass, by_mass ? params.top_p : params.top_k);
  }
  const int num_rivals = cutter.list_rivals(cut);
  return num_rivals <= LIST ? cutter.winner(num_rivals) : cutter.winner_of_row(cut);
}
