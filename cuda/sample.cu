// Choose a token for each row of logits without sorting the vocabulary: engine/ops/sample_cuda.py has
// the contract, engine/ops/sample.py the definition. Two kernels, the second works on what the first
// notes:
//
//   sample_slices   grid (slices, rows): each block reads 4096 logits of a row once, keeps them in
//                   registers, and notes
//                     part     best logit and id (NaN, or infinity, if there was any); the mass of all
//                              tokens if top_p asks for it
//                     groups   the largest logit of each 64 tokens, if tokens are removed; else the
//                              rivals: those of the slice that may win the draw
//   sample_rows     grid (rows): one block joins the parts of a row. The best rival wins, unless a
//                   slice may have a better one than it noted: then the slice is read again.
//                   If tokens are removed:
//                     usual    a value near the k-th largest group maximum, and not above it, is one
//                              that at least k tokens reach. Only groups that reach it are read again;
//                              the few tokens found are cut and drawn from.
//                     else     (a large top_k, or a flat row under top_p) histograms over the row
//                              close in on the cut, then the row is drawn from.
//
// A draw first bounds every score with the token's coarse noise. The exact noise, logarithms in double,
// is computed only for the few rivals whose bound is high enough, by sample_rows.
//
// All sums are of integers (weights in units of 2**-40) or in an order that depends on V alone.
#include "common/dependent_launch.cuh"
#include "common/dtype.cuh"
#include "common/philox.cuh"
#include "common/reduce.cuh"
#include "common/select.cuh"
#include "common/sampling_row.cuh"
#include "common/truncated_draw.cuh"
#include "common/untruncated_draw.cuh"

// --- One slice ---

constexpr int SLICE_WARPS = SLICE_THREADS / 32;
constexpr u32 INFINITY_KEY = 0xff800000u, LOWEST_KEY = 0x007fffffu;  // ordered(+-infinity)
constexpr float LOWEST = -3.4028235e38f;

typedef float SliceValues[OCTETS_PER_THREAD][OCTET];

struct SliceShared {
  u32 key[SLICE_WARPS], highest[SLICE_WARPS];
  float mass[SLICE_WARPS];
  u32 best_id, num_rivals;
};

// The largest, or NaN if there is one.
DEV float largest(const float (&x)[OCTET]) {
  float best = x[0];
#pragma unroll
  for (int e = 1; e < OCTET; e++) best = max_or_nan(best, x[e]);
  return best;
}

// What no score of the octets' tokens exceeds, in the unit of upper_score; +infinity, if its coarse
// bits say nothing.
// Returns the largest finite one.
DEV float upper_scores(const Row& row, const SliceValues& x, const int (&first)[OCTETS_PER_THREAD],
                       SliceValues& upper) {
  const float scale = row.score_scale();
  float highest = -infinity();
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
    const Words words = philox(row.params->seed, first[o] / OCTET, row.position, COARSE_STREAM);
#pragma unroll
    for (int e = 0; e < OCTET; e++) {
      upper[o][e] = upper_score(x[o][e], scale, coarse_of(words, e));
      highest = fmaxf(highest, upper[o][e]);
    }
  }
  if (highest == infinity()) {  // seldom
    highest = -infinity();
#pragma unroll
    for (int o = 0; o < OCTETS_PER_THREAD; o++) {
#pragma unroll
      for (int e = 0; e < OCTET; e++) {
        if (upper[o][e] < infinity()) highest = fmaxf(highest, upper[o][e]);
      }
    }
  }
  return highest;
}

// Note the tokens that may have the best score, those whose bound is next to the highest.
DEV void list_rivals(const SliceValues& upper, float highest, const int (&first)[OCTETS_PER_THREAD],
                     Rival* rivals, SliceShared& shared) {
  const float limit = fmaxf(highest - LISTED, LOWEST);
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
    float octet_highest = upper[o][0];
#pragma unroll
    for (int e = 1; e < OCTET; e++) octet_highest = fmaxf(octet_highest, upper[o][e]);
    if (!(octet_highest >= limit)) continue;
#pragma unroll
    for (int e = 0; e < OCTET; e++) {
      if (!(upper[o][e] >= limit)) continue;
      const u32 place = atomicAdd(&shared.num_rivals, 1u);
      if (place < MAX_RIVALS) rivals[place] = {upper[o][e], (u32)(first[o] + e)};
    }
  }
}

// Of all tokens, relative to the slice's best logit.
DEV float slice_mass(const Row& row, const SliceValues& x, float best, SliceShared& shared) {
  const float scale = row.score_scale();
  float sum = 0.f;
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
#pragma unroll
    for (int e = 0; e < OCTET; e++) sum += fast_exp2((x[o][e] - best) * scale);
  }
  return block_sum<SLICE_THREADS>(sum, shared.mass);
}

extern "C" __global__ void __launch_bounds__(SLICE_THREADS, SAMPLING_CLASS == 0 ? 4 : 5) sample_slices(
    Part* __restrict__ parts,             // [rows, slices]
    u32* __restrict__ groups,             // [rows, slices, SLICE / GROUP] ordered, or rivals
    const scalar_t* logits,               // [rows, V], rows `stride` apart
    const u8* masks,                      // [rows, V bits in words of 32] or null
    const int* rows, const int* positions, const RowParams* params, i64 stride, int vocab_size, int is_aligned)
{
  __shared__ SliceShared shared;
  if (threadIdx.x == 0) {
    shared.best_id = 0xffffffffu;
    shared.num_rivals = 0;
  }
  grid_dependency_wait();
  grid_dependency_launch();
  const int index = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int number = CAN_DRAW ? rows[index] : 0;  // on its way while the logits are asked for
  SliceValues x;
  int first[OCTETS_PER_THREAD];
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
    first[o] = blockIdx.x * SLICE + (o * SLICE_THREADS + threadIdx.x) * OCTET;
    raw_octet(logits + index * stride, first[o], vocab_size, is_aligned, x[o]);
  }
  const Row row =
      row_of(index, number, logits, stride, masks, positions, params, vocab_size, is_aligned);

  float octet_best[OCTETS_PER_THREAD], best = -infinity();
#pragma unroll
  for (int o = 0; o < OCTETS_PER_THREAD; o++) {
    octet_best[o] = largest(x[o]);
    best = max_or_nan(best, octet_best[o]);
  }
  if (CAN_EDIT && row.has_edits()) {
    const bool is_bad = !(best < infinity());  // whatever the edits make of it
#pragma unroll
    for (int o = 0; o < OCTETS_PER_THREAD; o++) {
      row.edit(first[o], x[o]);
      octet_best[o] = largest(x[o]);
      best = o == 0 ? octet_best[o] : max_or_nan(best, octet_best[o]);
    }
    if (is_bad) best = infinity();
  }
  if (CAN_DRAW && (row.flags & TRUNCATE)) {
#pragma unroll
    for (int o = 0; o < OCTETS_PER_THREAD; o++) {
      const float group_best = warp_max<GROUP / OCTET>(octet_best[o]);
      const i64 group = (i64)index * gridDim.x * GROUPS_PER_SLICE + first[o] / GROUP;
      if (threadIdx.x % (GROUP / OCTET) == 0) groups[group] = ordered(group_best);
    }
  }
  const bool is_drawn = CAN_DRAW && (row.flags & DRAW) && !(row.flags & TRUNCATE);
  SliceValues upper;
  float highest = -infinity();
  if (is_drawn) highest = upper_scores(row, x, first, upper);

  // joined as keys: that of a NaN is the largest
  u32 key = __reduce_max_sync(FULL_WARP, ordered(best));
  u32 highest_key = is_drawn ? __reduce_max_sync(FULL_WARP, ordered(highest)) : 0;
  if (lane == 0) {
    shared.key[warp] = key;
    shared.highest[warp] = highest_key;
  }
  __syncthreads();
  key = __reduce_max_sync(FULL_WARP, shared.key[lane % SLICE_WARPS]);
  const float slice_best = from_ordered(key);
  if (best == slice_best) {
    u32 id = first[0];
#pragma unroll
    for (int i = OCTETS_PER_THREAD * OCTET - 1; i >= 0; i--) {
      const int o = i / OCTET, e = i % OCTET;
      if (x[o][e] == slice_best) id = first[o] + e;
    }
    atomicMin(&shared.best_id, id);
  }
  const bool is_usable = key > LOWEST_KEY && key < INFINITY_KEY;
  float mass = 0.f;
  highest = -infinity();
  if (is_drawn) {  // the same for all threads
    highest = from_ordered(__reduce_max_sync(FULL_WARP, shared.highest[lane % SLICE_WARPS]));
    list_rivals(upper, highest, first, rivals_of_slice(groups, index, blockIdx.x, gridDim.x), shared);
  }
  if (CAN_DRAW && (row.flags & MASS) && is_usable) {
    mass = slice_mass(row, x, slice_best, shared);
  } else {
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    parts[(i64)index * gridDim.x + blockIdx.x] = {ranked(key, shared.best_id), highest,
                                                  shared.num_rivals, mass};
  }
}

// --- Joining the slices of a row ---

// The best rank of all slices. Every warp joins all parts, so that every thread knows.
DEV u64 best_of_parts(const Part* parts, int num_slices) {
  u64 best = 0;
  for (int i = threadIdx.x % 32; i < num_slices; i += 32) best = parts[i].best > best ? parts[i].best : best;
  return warp_max_u64(best);
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
  const int index = blockIdx.x;
#if SAMPLING_CLASS >= 1
  __shared__ RowShared shared;
  // sample_slices writes nothing of a row, and all before it has ended: this need not wait
  const Row row =
      row_of(index, rows[index], logits, stride, masks, positions, params, vocab_size, is_aligned);
  for (int i = threadIdx.x; i < BUCKETS; i += ROW_THREADS) shared.buckets.count[i] = 0;
  if (threadIdx.x == 0) shared.start_listing();
  __syncthreads();
#endif
  grid_dependency_wait();
  grid_dependency_launch();
#if SAMPLING_CLASS >= 1
  const u32* row_groups = groups + (i64)index * num_slices * GROUPS_PER_SLICE;
  GroupKeys keys;
  if (row.flags & TRUNCATE) keys = load_keys(row_groups, (vocab_size + GROUP - 1) / GROUP);
#endif
  parts += (i64)index * num_slices;
  const u64 best_rank = best_of_parts(parts, num_slices);
  const float best = from_ordered(rank_key(best_rank));
  const bool bad = !(best > -infinity() && best < infinity());
  u32 token = bad ? 0 : rank_id(best_rank);
#if SAMPLING_CLASS >= 1
  const float tempered_best = row.tempered(best);
  if (!bad && (row.flags & DRAW) && fabsf(tempered_best) < infinity()) {
    token = row.flags & TRUNCATE
                ? draw_truncated(row, parts, num_slices, keys, best, tempered_best, shared)
                : draw_from_all(row, parts, num_slices,
                                rivals_of_slice(groups, index, 0, num_slices), tempered_best);
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
