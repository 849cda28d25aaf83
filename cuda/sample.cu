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
//                              close in on the cut, then the row is drawn from.
//
// A draw first bounds every score with the token's coarse noise. The exact noise, logarithms in double,
// is computed only for the few rivals whose bound reaches the best lower bound.
//
// All sums are of integers (weights in units of 2**-40) or in an order that depends on V alone.
#include "common/dependent_launch.cuh"
#include "common/dtype.cuh"
#include "common/philox.cuh"
#include "common/reduce.cuh"
#include "common/select.cuh"
#include "common/sampling_row.cuh"
#include "common/truncated_draw.cuh"

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

// The better of `score` and the exact scores of an octet's rivals, one bit for each.
DEV Score best_rival(Score score, const Row& row, u32 rivals, const float (&x)[OCTET], int first) {
#pragma unroll 1
  while (rivals) {
    const int e = __ffs(rivals) - 1;
    rivals &= rivals - 1;
    float logit = x[0];
#pragma unroll
    for (int other = 1; other < OCTET; other++) logit = other == e ? x[other] : logit;
    const u32 id = first + e;
    score = better(score, {(double)logit + token_noise(row.params->seed, row.position, id), id});
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
    score = best_rival(score, row, rivals[o], x[o], first[o]);
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
    const scalar_t* logits,               // [rows, V], rows `stride` apart
    const u8* masks,                      // [rows, V bits in words of 32] or null
    const int* rows, const int* positions, const RowParams* params, i64 stride, int vocab_size, int is_aligned)
{
  __shared__ u64 shared_best[SLICE_THREADS / 32];
  grid_dependency_wait();
  grid_dependency_launch();
  const int index = blockIdx.y;
  float x[OCTETS_PER_THREAD][OCTET];
  int first[OCTETS_PER_THREAD];
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
    first[o] = blockIdx.x * SLICE + (o * SLICE_THREADS + threadIdx.x) * OCTET;
    raw_octet(logits + index * stride, first[o], vocab_size, is_aligned, x[o]);
  }
  // behind the logits' loads: it waits for one number to load the next
  const Row row =
      row_of(index, logits, stride, masks, rows, positions, params, vocab_size, is_aligned);
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

// Grid: a block for each row; 32 threads suffice for SAMPLING_CLASS 0, else ROW_THREADS.
extern "C" __global__ void
#if SAMPLING_CLASS >= 1
__launch_bounds__(ROW_THREADS, 1)
#endif
sample_rows(
    i64* __restrict__ token_ids,   // [rows]
    u8* __restrict__ is_bad,       // [rows]
    i64* __restrict__ last_token,  // by row number, or null
    const Part* parts, const u32* groups,  // of sample_slices
    const scalar_t* logits, const u8* masks, const int* rows, const int* positions, const RowParams* params,
    i64 stride, int vocab_size, int is_aligned, int num_slices)
{
  grid_dependency_wait();
  grid_dependency_launch();
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
  if (row.flags & PENALTIES) {  // the next step sees it
    u16& entry = row.params->tokens[token];
    if ((entry & COUNT) < COUNT) entry++;
  }
#endif
}
