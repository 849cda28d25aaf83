// Choose a token for each row of logits without sorting the vocabulary: engine/ops/sample_cuda.py has
// the contract, engine/ops/sample.py the definition. Two kernels, the second works on what the first
// notes:
//
//   sample_slices   grid (slices, rows): each block reads 4096 logits of a row once, keeps them in
//                   registers, and notes
//                     part     best logit and id, NaN or infinity seen; the winner of the draw if no
//                              token is removed; the mass of all tokens if top_p asks for it
//                     groups   the largest logit of each 64 tokens, if tokens are removed
//   sample_rows     grid (rows): one block joins the parts of a row. If tokens are removed:
//                     usual    the k-th largest group maximum is a value that at least k tokens reach.
//                              Only groups that reach it are read again; the few tokens found are
//                              sorted, cut and drawn from.
//                     else     (a large top_k, or a flat row under top_p) histograms over the row
//                              close in on the cut, then one pass draws from what is left.
//
// A draw first bounds every score with the token's coarse noise. The exact noise, logarithms in double,
// is computed only for the few rivals whose bound reaches the best lower bound.
//
// All sums are of integers (weights in units of 2**-40) or in an order that depends on V alone.
#include "common/dtype.cuh"
#include "common/philox.cuh"
#include "common/reduce.cuh"
#include "common/select.cuh"
#include "common/sampling_row.cuh"

// What sample_slices finds out about a slice.
struct Part {
  u64 best;      // rank of the best token, before temperature
  double score;  // of the winner of the draw
  u32 winner;
  float mass;    // of all tokens, relative to the slice's best
  u32 is_bad;    // NaN or +infinity among the logits as they came
  u32 unused;
};

// --- One slice ---

DEV u64 slice_max(u64 x, u64* shared) {
  x = warp_max_u64(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[0];
#pragma unroll
  for (int warp = 1; warp < SLICE_THREADS / 32; warp++) x = shared[warp] > x ? shared[warp] : x;
  return x;
}

// Called, not inlined: in sample_rows its registers would be too many beside the kernel's own.
__device__ __noinline__ double called_token_noise(u64 seed, u32 position, u32 id) {
  return token_noise(seed, position, id);
}

// The better of `score` and the exact scores of an octet's rivals, one bit for each.
template <bool INLINE>
DEV Score best_rival(Score score, const Row& row, u32 rivals, const float (&x)[OCTET], int first) {
#pragma unroll 1
  while (rivals) {
    const int e = __ffs(rivals) - 1;
    rivals &= rivals - 1;
    float logit = x[0];
#pragma unroll
    for (int other = 1; other < OCTET; other++) logit = other == e ? x[other] : logit;
    const u32 id = first + e;
    const u64 seed = row.params->seed;
    const double noise = INLINE ? token_noise(seed, row.position, id)
                                : called_token_noise(seed, row.position, id);
    score = better(score, {(double)logit + noise, id});
  }
  return score;
}

// The largest of logit + noise among all tokens of the slice; `x` are its tempered logits.
DEV Score draw_from_slice(const Row& row, const float (&x)[OCTETS_PER_THREAD][OCTET], float best,
                          const int (&first)[OCTETS_PER_THREAD]) {
  __shared__ float shared_reach[SLICE_THREADS / 32];
  __shared__ Score shared_score[SLICE_THREADS / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float estimate[OCTETS_PER_THREAD][OCTET], highest = -infinity(), at_highest = 0.f;
  u32 coarse_highest = 0, rivals[OCTETS_PER_THREAD];
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
    const Words words = philox(row.params->seed, first[o] / OCTET, row.position, COARSE_STREAM);
    rivals[o] = 0;
#pragma unroll
    for (int e = 0; e < OCTET; e++) {
      const u32 coarse = coarse_of(words, e);
      const float distance = x[o][e] - best;
      estimate[o][e] = distance + noise_estimate(coarse);
      if (coarse == 0) rivals[o] |= 1u << e;
      if (estimate[o][e] > highest) {
        highest = estimate[o][e];
        at_highest = distance;
        coarse_highest = coarse;
      }
    }
  }
  const float certain = warp_max(highest > -infinity() ? at_highest + least_noise(coarse_highest)
                                                       : -infinity());
  if (lane == 0) shared_reach[warp] = certain;
  __syncthreads();
  const float reach = warp_max(lane < SLICE_THREADS / 32 ? shared_reach[lane] : -infinity()) -
                      ESTIMATE_TO_BOUND - BOUND_SLACK;
  Score score = {-(double)infinity(), 0xffffffffu};
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
#pragma unroll
    for (int e = 0; e < OCTET; e++) {
      if (estimate[o][e] >= reach) rivals[o] |= 1u << e;
      if (!(x[o][e] > -infinity())) rivals[o] &= ~(1u << e);
    }
    score = best_rival<true>(score, row, rivals[o], x[o], first[o]);
  }
  score = warp_best(score);
  if (lane == 0) shared_score[warp] = score;
  __syncthreads();
  score = shared_score[0];
#pragma unroll
  for (int w = 1; w < SLICE_THREADS / 32; w++) score = better(score, shared_score[w]);
  return score;
}

DEV float slice_mass(const float (&x)[OCTETS_PER_THREAD][OCTET], float best) {
  __shared__ float shared[SLICE_THREADS / 32];
  float sum = 0.f;
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
#pragma unroll
    for (int e = 0; e < OCTET; e++) sum += expf(x[o][e] - best);
  }
  return block_sum<SLICE_THREADS>(sum, shared);
}

extern "C" __global__ void __launch_bounds__(SLICE_THREADS, SAMPLING_CLASS == 2 ? 3 : 4) sample_slices(
    Part* __restrict__ parts,             // [rows, slices]
    u32* __restrict__ groups,             // [rows, slices * SLICE / GROUP] ordered
    const scalar_t* __restrict__ logits,  // [rows, V], rows `stride` apart
    const u8* __restrict__ masks,         // [rows, V] or null
    const int* __restrict__ rows, const int* __restrict__ positions,
    const RowParams* __restrict__ params, i64 stride, int vocab_size, int is_aligned)
{
  __shared__ u64 shared_best[SLICE_THREADS / 32];
  static_assert(OCTETS_PER_THREAD == 2, "a rival's octet is one of two");
  const int index = blockIdx.y;
  const Row row =
      row_of(index, logits, stride, masks, rows, positions, params, vocab_size, is_aligned);
  float x[OCTETS_PER_THREAD][OCTET];
  int first[OCTETS_PER_THREAD];
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
    first[o] = blockIdx.x * SLICE + (o * SLICE_THREADS + threadIdx.x) * OCTET;
    raw_octet(row.logits, first[o], vocab_size, row.is_aligned, x[o]);
  }
  bool is_bad = false;
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
#pragma unroll
    for (int e = 0; e < OCTET; e++) is_bad |= !(x[o][e] < infinity());
    row.edit(first[o], x[o]);
  }

  float best = -infinity();
  u32 best_id = first[0];
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
    float octet_best = -infinity();
#pragma unroll
    for (int e = 0; e < OCTET; e++) {
      if (x[o][e] > octet_best) {
        octet_best = x[o][e];
        if (x[o][e] > best) {
          best = x[o][e];
          best_id = first[o] + e;
        }
      }
    }
    if (CAN_DRAW && (row.flags & TRUNCATE)) {
      const float group_best = warp_max<GROUP / OCTET>(octet_best);
      const i64 group = (i64)index * gridDim.x * (SLICE / GROUP) + first[o] / GROUP;
      if (threadIdx.x % (GROUP / OCTET) == 0) groups[group] = ordered(group_best);
    }
  }
  is_bad = __syncthreads_or(is_bad);
  const u64 rank = slice_max(ranked(ordered(best), best_id), shared_best);

  Part part = {rank, -(double)infinity(), 0xffffffffu, 0.f, is_bad ? 1u : 0u, 0u};
  const float slice_best = from_ordered(rank_key(rank));
  const bool is_usable = !is_bad && slice_best > -infinity() && slice_best < infinity();
  if (CAN_DRAW && (row.flags & DRAW) && is_usable) {  // the same for all threads
#pragma unroll
    for (int o = 0; o < OCTETS_PER_THREAD; o++) {
#pragma unroll
      for (int e = 0; e < OCTET; e++) x[o][e] = row.tempered(x[o][e]);
    }
    if (!(row.flags & TRUNCATE)) {
      const Score score = draw_from_slice(row, x, row.tempered(slice_best), first);
      part.score = score.value;
      part.winner = score.id;
    } else if (row.flags & MASS) {
      part.mass = slice_mass(x, row.tempered(slice_best));
    }
  }
  if (threadIdx.x == 0) parts[(i64)index * gridDim.x + blockIdx.x] = part;
}

// --- Joining the slices of a row ---

// What all slices say together. Every warp joins all parts, so that every thread knows.
DEV Part join_parts(const Part* parts, int num_slices) {
  const int lane = threadIdx.x % 32;
  Part all = {0, -(double)infinity(), 0xffffffffu, 0.f, 0, 0};
  for (int i = lane; i < num_slices; i += 32) {
    all.best = parts[i].best > all.best ? parts[i].best : all.best;
    all.is_bad |= parts[i].is_bad;
    const Score score = better({all.score, all.winner}, {parts[i].score, parts[i].winner});
    all.score = score.value;
    all.winner = score.id;
  }
  all.best = warp_max_u64(all.best);
  all.is_bad = __ballot_sync(FULL_WARP, all.is_bad) != 0;
  const Score score = warp_best({all.score, all.winner});
  all.score = score.value;
  all.winner = score.id;
  return all;
}

#if SAMPLING_CLASS >= 1

constexpr int ROW_THREADS = 1024;
constexpr int LIST = 2 * ROW_THREADS;  // tokens that can be sorted
constexpr int BINS = 2 * ROW_THREADS;  // of a histogram
constexpr int MAX_DIRECT_TOP_K = 1024;
constexpr int TOP_P_BUDGET = 256;  // candidates for top_p and min_p alone
constexpr int MAX_GROUPS = 8192;
constexpr float BINS_PER_UNIT = 64.f;  // of the first histogram, over the distance from the best logit
constexpr double MASS_UNITS = 1099511627776.0;  // 2**40 for a weight of 1

struct Histogram {
  u32 count[BINS], mass_low[BINS], mass_high[BINS];
};

struct RowShared {
  union {
    Histogram histogram;
    u16 groups[MAX_GROUPS];  // those to be read again
  };
  u64 list[LIST];  // ranks
  CrossingShared crossing;
  float reach[MAX_WARPS];
  Score score[MAX_WARPS];
  u32 num_groups, num_listed, found_id;
};

// The row in sample_rows, with tempered logits relative to their best.
struct Cutter {
  const Row& row;
  float best;
  RowShared& shared;

  // Weight in units of 2**-40.
  DEV u64 weight(float x) const { return (u64)(expf(x - best) * (float)MASS_UNITS); }

  template <class F>
  DEV void for_each_token(F f) const {
#pragma unroll 1
    for (int first = threadIdx.x * OCTET; first < row.vocab_size; first += ROW_THREADS * OCTET) {
      float x[OCTET];
      row.tempered_octet(first, x);
#pragma unroll
      for (int e = 0; e < OCTET; e++) f(x[e], first + e);
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

  // List the tokens of at least the tempered value `reached`.
  DEV void list_candidates(const u32* groups, int num_groups, float reached) {
    if (threadIdx.x == 0) shared.num_groups = shared.num_listed = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < num_groups; i += ROW_THREADS) {
      if (row.tempered(from_ordered(groups[i])) >= reached) {
        shared.groups[atomicAdd(&shared.num_groups, 1u)] = (u16)i;
      }
    }
    __syncthreads();
    const int num_octets = shared.num_groups * (GROUP / OCTET);
    for (int i = threadIdx.x; i < num_octets; i += ROW_THREADS) {
      const int first = shared.groups[i / (GROUP / OCTET)] * GROUP + i % (GROUP / OCTET) * OCTET;
      if (first >= row.vocab_size) continue;
      float x[OCTET];
      row.tempered_octet(first, x);
#pragma unroll
      for (int e = 0; e < OCTET; e++) {
        if (x[e] >= reached && x[e] > -infinity()) push(ranked(ordered(x[e]), first + e));
      }
    }
    __syncthreads();
  }

  // With the candidates listed, sorted: how many of them are kept, or 0 if they do not tell.
  DEV int kept_candidates(int num_listed, bool is_complete, float floor, double mass) {
    const RowParams& params = *row.params;
    const int i = 2 * threadIdx.x;
    const float a = i < num_listed ? from_ordered(rank_key(shared.list[i])) : -infinity();
    const float b = i + 1 < num_listed ? from_ordered(rank_key(shared.list[i + 1])) : -infinity();
    int left = __syncthreads_count(i < num_listed && a >= floor) +
               __syncthreads_count(i + 1 < num_listed && b >= floor);
    if (params.top_k > 0) {
      left = left < params.top_k ? left : params.top_k;
      is_complete = true;  // nothing else can be among the first k
    }
    if (params.top_p >= 1) return is_complete ? left : 0;
    const u64 weight_a = i < left ? weight(a) : 0, weight_b = i + 1 < left ? weight(b) : 0;
    if (is_complete) {
      mass = (double)block_crossing(weight_a, weight_b, 0, infinity(), shared.crossing).total;
    } else if (!(row.flags & MASS)) {
      return 0;
    }
    const Crossing last =
        block_crossing(weight_a, weight_b, 0, params.top_p * mass, shared.crossing);
    return last.index >= 0 ? last.index + 1 : is_complete ? left : 0;
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
    u32 members = 0;
    int bin = -1;
    u32 prefix = 0, known = 0;
    const int a = 2 * threadIdx.x, b = a + 1;
    auto is_member = [&](float x, u64 rank) {
      return rank >= cut && (bin < 0 || distance_bin(x) == bin) && (rank_key(rank) & known) == prefix;
    };
#pragma unroll 1
    for (int level = 0; level < 4; level++) {  // the distance, then the digits of the key
      const int shift = level == 1 ? 21 : level == 2 ? 10 : 0;
      const u32 digit_mask = level == 3 ? 1023u : 2047u;
      histogram.count[a] = histogram.mass_low[a] = histogram.mass_high[a] = 0;
      histogram.count[b] = histogram.mass_low[b] = histogram.mass_high[b] = 0;
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
      u64 of_a = histogram.count[a], of_b = histogram.count[b];
      if (by_mass) {
        of_a = (u64)histogram.mass_high[a] << 32 | histogram.mass_low[a];
        of_b = (u64)histogram.mass_high[b] << 32 | histogram.mass_low[b];
        if (level == 0) {
          const Crossing all = block_crossing(of_a, of_b, 0, infinity(), shared.crossing);
          limit = amount * (double)all.total;
        }
      }
      const Crossing crossing = block_crossing(of_a, of_b, start, limit, shared.crossing);
      if (crossing.index < 0) return cut;  // fewer tokens than top_k
      start = crossing.before;
      members = histogram.count[crossing.index];
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
    u64 of_a = a < (int)members, of_b = b < (int)members;
    if (by_mass) {
      of_a = of_a ? weight(from_ordered(rank_key(shared.list[a]))) : 0;
      of_b = of_b ? weight(from_ordered(rank_key(shared.list[b]))) : 0;
    }
    const Crossing last = block_crossing(of_a, of_b, start, limit, shared.crossing);
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
      // index 2t stands for thread t
      const Crossing crossing =
          block_crossing(__popc(equal), 0, seen, (double)wanted, shared.crossing);
      if (crossing.index >= 0) {
        if (crossing.index / 2 == (int)threadIdx.x) {
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
    return warp_max(shared.reach[threadIdx.x % 32]) - ESTIMATE_TO_BOUND - BOUND_SLACK;
  }
  DEV u32 block_winner(Score score) {
    score = warp_best(score);
    if (threadIdx.x % 32 == 0) shared.score[threadIdx.x / 32] = score;
    __syncthreads();
    return warp_best(shared.score[threadIdx.x % 32]).id;
  }

  DEV u32 draw_from_list(int count) {
    const u64 seed = row.params->seed;
    float estimate[2] = {-infinity(), -infinity()}, certain = -infinity();
    bool is_rival[2] = {false, false};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int i = j * ROW_THREADS + threadIdx.x;
      if (i >= count) continue;
      const u64 rank = shared.list[i];
      const u32 coarse = coarse_bits(seed, row.position, rank_id(rank));
      const float distance = from_ordered(rank_key(rank)) - best;
      estimate[j] = distance + noise_estimate(coarse);
      is_rival[j] = coarse == 0;
      certain = fmaxf(certain, distance + least_noise(coarse));
    }
    const float reach = block_reach(certain);
    Score score = {-(double)infinity(), 0xffffffffu};
#pragma unroll 1
    for (int j = 0; j < 2; j++) {
      if (!(j ? is_rival[1] || estimate[1] >= reach : is_rival[0] || estimate[0] >= reach)) continue;
      const u64 rank = shared.list[j * ROW_THREADS + threadIdx.x];
      const u32 id = rank_id(rank);
      const double value = from_ordered(rank_key(rank));
      score = better(score, {value + called_token_noise(seed, row.position, id), id});
    }
    return block_winner(score);
  }

  // Among all tokens with a rank of at least `cut`.
  DEV u32 draw_from_row(u64 cut) {
    const u64 seed = row.params->seed;
    float highest = -infinity(), at_highest = 0.f;
    u32 coarse_highest = 0;
#pragma unroll 1
    for (int first = threadIdx.x * OCTET; first < row.vocab_size; first += ROW_THREADS * OCTET) {
      float x[OCTET];
      row.tempered_octet(first, x);
      const Words words = philox(seed, first / OCTET, row.position, COARSE_STREAM);
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
    const float reach = block_reach(highest > -infinity() ? at_highest + least_noise(coarse_highest)
                                                          : -infinity());
    Score score = {-(double)infinity(), 0xffffffffu};
#pragma unroll 1
    for (int first = threadIdx.x * OCTET; first < row.vocab_size; first += ROW_THREADS * OCTET) {
      float x[OCTET];
      u32 rivals = 0;
      row.tempered_octet(first, x);
      const Words words = philox(seed, first / OCTET, row.position, COARSE_STREAM);
#pragma unroll
      for (int e = 0; e < OCTET; e++) {
        const u32 coarse = coarse_of(words, e);
        const bool is_rival = coarse == 0 || x[e] - best + noise_estimate(coarse) >= reach;
        if (is_rival && ranked(ordered(x[e]), first + e) >= cut) rivals |= 1u << e;
      }
      score = best_rival<false>(score, row, rivals, x, first);
    }
    return block_winner(score);
  }
};

DEV u32 draw_truncated(const Row& row, const Part* parts, int num_slices, const u32* groups,
                       float best) {
  __shared__ RowShared shared;
  Cutter cutter = {row, best, shared};
  const RowParams& params = *row.params;
  const float floor = __fadd_rn(best, params.log_min_p);
  const int num_groups = (row.vocab_size + GROUP - 1) / GROUP;
  if (params.top_k <= MAX_DIRECT_TOP_K) {
    const int budget = params.top_k > 0 ? params.top_k : TOP_P_BUDGET;
    // a value before temperature that so many tokens reach, if as many are finite; 0: all do
    const u32 key = block_kth_largest(groups, num_groups, budget, shared.histogram.count,
                                      shared.crossing);
    const float reached = key ? row.tempered(from_ordered(key)) : -infinity();
    cutter.list_candidates(groups, num_groups, fmaxf(reached, floor));
    const int num_listed = shared.num_listed;
    if (num_listed <= LIST) {
      double mass = 0;
      if (row.flags & MASS) {
        for (int i = 0; i < num_slices; i++) {
          if (!(parts[i].mass > 0)) continue;
          const float slice_best = row.tempered(from_ordered(rank_key(parts[i].best)));
          mass += (double)expf(slice_best - best) * parts[i].mass;
        }
      }
      block_sort_descending(shared.list, num_listed);
      const bool is_complete = !(reached > floor) || reached == -infinity();
      const int kept =
          cutter.kept_candidates(num_listed, is_complete, floor, mass * MASS_UNITS);
      if (kept > 0) return cutter.draw_from_list(kept);
    }
  }
  // no token of -infinity, and none below the floor
  const u32 lowest = ordered(-infinity()) + 1, floor_key = ordered(floor);
  u64 cut = (u64)(floor_key > lowest ? floor_key : lowest) << 32;
  if (params.top_k > 0) cut = cutter.narrow_cut(cut, false, params.top_k);
  if (params.top_p < 1) cut = cutter.narrow_cut(cut, true, params.top_p);
  return cutter.draw_from_row(cut);
}

#endif

// Grid: a block for each row; 32 threads suffice for SAMPLING_CLASS 0, else ROW_THREADS.
extern "C" __global__ void
#if SAMPLING_CLASS >= 1
__launch_bounds__(ROW_THREADS)
#endif
sample_rows(
    i64* __restrict__ token_ids,   // [rows]
    u8* __restrict__ is_bad,       // [rows]
    i64* __restrict__ last_token,  // by row number, or null
    const Part* __restrict__ parts, const u32* __restrict__ groups,
    const scalar_t* __restrict__ logits, const u8* __restrict__ masks, const int* __restrict__ rows,
    const int* __restrict__ positions, const RowParams* __restrict__ params, i64 stride,
    int vocab_size, int is_aligned, int num_slices)
{
  const int index = blockIdx.x;
  parts += (i64)index * num_slices;
  const Part all = join_parts(parts, num_slices);
  const float best = from_ordered(rank_key(all.best));
  const bool bad = all.is_bad || !(best > -infinity() && best < infinity());
  u32 token = bad ? 0 : rank_id(all.best);
#if SAMPLING_CLASS >= 1
  const Row row =
      row_of(index, logits, stride, masks, rows, positions, params, vocab_size, is_aligned);
  const float tempered_best = row.tempered(best);
  if (!bad && (row.flags & DRAW) && fabsf(tempered_best) < infinity()) {
    groups += (i64)index * num_slices * (SLICE / GROUP);
    token = row.flags & TRUNCATE ? draw_truncated(row, parts, num_slices, groups, tempered_best)
                                 : all.winner;
  }
#endif
  if (threadIdx.x != 0) return;
  token_ids[index] = token;
  is_bad[index] = bad;
  if (last_token != nullptr) last_token[rows[index]] = token;
#if SAMPLING_CLASS >= 2
  if (row.flags & PENALTIES) row.params->tokens[token]++;  // the next step sees it
#endif
}
