// Log-probabilities of raw logits at sampled tokens: value, rank, and the best few of each row.
// engine/ops/logprobs_cuda.py has the contract.
//
//   logprob_slices  grid (slices, rows): reads 4096 logits of a row once; notes their maximum, the sum of
//                   exp(logit - maximum), and the maximum of each 64
//   logprob_rows    grid (rows): joins these. A rank counts larger values, and the best tokens are the
//                   best of all: either way only 64-token groups whose maximum says so are read again.
//
// logprob = (logit - maximum) - log(sum), rounded twice; ranks and order are those of the rounded values.
#define SAMPLING_CLASS 1
#include "common/dtype.cuh"
#include "common/reduce.cuh"
#include "common/select.cuh"
#include "common/sampling_row.cuh"

constexpr int LIST = BINS;
constexpr int OCTETS_PER_GROUP = GROUP / OCTET;

struct SliceSum {
  float maximum, sum;
};

extern "C" __global__ void __launch_bounds__(SLICE_THREADS) logprob_slices(
    SliceSum* __restrict__ parts,  // [rows, slices]
    u32* __restrict__ groups,      // [rows, slices * SLICE / GROUP] ordered
    const scalar_t* __restrict__ logits, const int* __restrict__ rows,
    const RowParams* __restrict__ params, i64 stride, int vocab_size, int is_aligned)
{
  __shared__ float shared_maximum[SLICE_THREADS / 32], shared_sum[SLICE_THREADS / 32];
  const int index = blockIdx.y;
  if (params[rows[index]].num_logprobs < 0) return;
  float x[OCTETS_PER_THREAD][OCTET], maximum = -infinity();
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
    const int first = blockIdx.x * SLICE + (o * SLICE_THREADS + threadIdx.x) * OCTET;
    raw_octet(logits + index * stride, first, vocab_size, is_aligned, x[o]);
    float octet_maximum = x[o][0];
#pragma unroll
    for (int e = 1; e < OCTET; e++) octet_maximum = fmaxf(octet_maximum, x[o][e]);
    const float group_maximum = warp_max<OCTETS_PER_GROUP>(octet_maximum);
    const i64 group = (i64)index * gridDim.x * (SLICE / GROUP) + first / GROUP;
    if (threadIdx.x % OCTETS_PER_GROUP == 0) groups[group] = ordered(group_maximum);
    maximum = fmaxf(maximum, octet_maximum);
  }
  maximum = block_max<SLICE_THREADS>(maximum, shared_maximum);
  float sum = 0.f;
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
#pragma unroll
    for (int e = 0; e < OCTET; e++) sum += expf(x[o][e] - maximum);
  }
  sum = block_sum<SLICE_THREADS>(sum, shared_sum);
  // a slice of -infinity alone has a sum of NaN, which counts for nothing
  if (threadIdx.x == 0) {
    parts[(i64)index * gridDim.x + blockIdx.x] = {maximum, maximum > -infinity() ? sum : 0.f};
  }
}

struct Shared {
  u32 count[BINS];
  u64 list[LIST];  // ranks by log-probability
  CrossingShared crossing;
  u64 warp_best[MAX_WARPS];
  u32 num_listed;
};

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) logprob_rows(
    float* __restrict__ sampled,       // [rows]
    i64* __restrict__ ranks,           // [rows]
    i64* __restrict__ top_ids,         // [rows, num_top], best first
    float* __restrict__ top_logprobs,  // [rows, num_top]
    const SliceSum* __restrict__ parts, const u32* __restrict__ groups,
    const scalar_t* __restrict__ logits, const int* __restrict__ rows,
    const RowParams* __restrict__ params, const i64* __restrict__ token_ids,
    const u8* __restrict__ is_bad, i64 stride, int vocab_size, int is_aligned, int num_slices,
    int num_top)
{
  __shared__ Shared shared;
  const int index = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  top_ids += (i64)index * num_top;
  top_logprobs += (i64)index * num_top;
  if (params[rows[index]].num_logprobs < 0 || is_bad[index]) {  // nobody will look
    for (int i = threadIdx.x; i < num_top; i += ROW_THREADS) {
      top_ids[i] = i;
      top_logprobs[i] = 0.f;
    }
    if (threadIdx.x == 0) {
      sampled[index] = 0.f;
      ranks[index] = 1;
    }
    return;
  }
  parts += (i64)index * num_slices;
  groups += (i64)index * num_slices * (SLICE / GROUP);
  logits += index * stride;

  // every warp joins the slices, in the same order
  float maximum = -infinity(), sum = 0.f;
  for (int i = lane; i < num_slices; i += 32) maximum = fmaxf(maximum, parts[i].maximum);
  maximum = warp_max(maximum);
  for (int i = lane; i < num_slices; i += 32) {
    if (parts[i].sum > 0) sum += parts[i].sum * expf(parts[i].maximum - maximum);
  }
  const float log_sum = logf(warp_sum(sum));
  auto logprob = [&](float x) { return __fsub_rn(__fsub_rn(x, maximum), log_sum); };

  const int num_groups = (vocab_size + GROUP - 1) / GROUP;
  const int num_octets = (vocab_size + OCTET - 1) / OCTET;
  const float at_token = logprob(to_float(logits[token_ids[index]]));
  // f(logprob, id) for all tokens of groups that have one of at least `floor`
  auto for_each_from = [&](float floor, auto f) {
#pragma unroll 1
    for (int octet = threadIdx.x; octet < num_octets; octet += ROW_THREADS) {
      if (logprob(from_ordered(groups[octet / OCTETS_PER_GROUP])) < floor) continue;
      float x[OCTET];
      raw_octet(logits, octet * OCTET, vocab_size, is_aligned, x);
#pragma unroll
      for (int e = 0; e < OCTET; e++) {
        if (octet * OCTET + e < vocab_size) f(logprob(x[e]), octet * OCTET + e);
      }
    }
  };

  u64 larger[1] = {0};
  for_each_from(at_token, [&](float value, int) { larger[0] += value > at_token; });
  const u64 num_larger = block_crossing(larger, 0, infinity(), shared.crossing).total;
  if (threadIdx.x == 0) {
    sampled[index] = at_token;
    ranks[index] = num_larger + 1;
  }
  if (num_top == 0) return;

  const u32 key = block_kth_largest<ROW_THREADS>(groups, num_groups, num_top, shared.count,
                                                 shared.crossing);
  const float floor = key ? logprob(from_ordered(key)) : -infinity();
  if (threadIdx.x == 0) shared.num_listed = 0;
  __syncthreads();
  for_each_from(floor, [&](float value, int id) {
    if (value < floor) return;
    const u32 place = atomicAdd(&shared.num_listed, 1u);
    if (place < LIST) shared.list[place] = ranked(ordered(value), id);
  });
  __syncthreads();
  const u32 num_listed = shared.num_listed;
  if (num_listed <= LIST) {
    block_sort_descending(shared.list, num_listed);
  } else {  // too many equals: the best one after another
    u64 last = ~0ull;
#pragma unroll 1
    for (int i = 0; i < num_top; i++) {
      u64 best = 0;
      for_each_from(floor, [&](float value, int id) {
        const u64 rank = ranked(ordered(value), id);
        if (rank < last && rank > best) best = rank;
      });
      best = warp_max_u64(best);
      if (lane == 0) shared.warp_best[warp] = best;
      __syncthreads();
      last = warp_max_u64(lane < ROW_THREADS / 32 ? shared.warp_best[lane] : 0);
      if (threadIdx.x == 0) shared.list[i] = last;
      __syncthreads();
    }
  }
  for (int i = threadIdx.x; i < num_top; i += ROW_THREADS) {
    top_ids[i] = rank_id(shared.list[i]);
    top_logprobs[i] = from_ordered(rank_key(shared.list[i]));
  }
}
