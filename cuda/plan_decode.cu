// The work list of decode attention, made on the device once per step: see engine/ops/plan_decode.py for
// the contract, the choice of the chunk, and the same in numpy.
//
// One thread block of 1024, thread i for row i. First the chunk: each warp tries two candidates. Then
// each row's places in the lists, by prefix sums, and the items. All of it in integers and in a fixed
// order, so that the host's twin gives the same list.
#include "common/dependent_launch.cuh"
#include "common/dtype.cuh"
#include "common/work_item.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / 32;
constexpr int TILE = 16;           // of paged_decode.cu
constexpr int STEP = 64;           // chunks are multiples of it
constexpr int MIN_CHUNK = 128;
constexpr int CANDIDATES = 2 * WARPS;
constexpr int ALONE = 3;           // shares of the memory's rate that a thread block can read at
constexpr int BUCKETS = 32;        // of lengths, to start with the longest
constexpr int INT_MAX = 0x7fffffff;
constexpr int FIXED_MIN_CHUNK = 256, FIXED_MAX_PARTS = 32;

DEV int ceil_div(int a, int b) { return (a + b - 1) / b; }
DEV int round_up(int a, int b) { return ceil_div(a, b) * b; }

// Parts of the longest row that candidate i stands for: 1 to 32, then 40 to MAX_PARTS in steps of 8.
DEV int candidate_parts(int i) { return i < 32 ? i + 1 : 32 + (i - 31) * 8; }
static_assert(CANDIDATES == 64 && 32 + (CANDIDATES - 1 - 31) * 8 == MAX_PARTS, "the last candidate");

// A row's chunk by its own length.
DEV int fixed_chunk_of(int span) { return max(FIXED_MIN_CHUNK, round_up(ceil_div(span, FIXED_MAX_PARTS), STEP)); }

// Sum over the threads before this one; `total` becomes the sum over all. Uses `shared` [WARPS + 1].
DEV u64 exclusive_sum(u64 value, u64* shared, u64& total) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u64 sum = value;
  for (int d = 1; d < 32; d *= 2) {
    const u64 before = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += before;
  }
  __syncthreads();  // an earlier call's results have been read
  if (lane == 31) shared[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    u64 warp_sum = shared[lane];
    for (int d = 1; d < 32; d *= 2) {
      const u64 before = __shfl_up_sync(~0u, warp_sum, d);
      if (lane >= d) warp_sum += before;
    }
    if (lane == 31) shared[WARPS] = warp_sum;
    shared[lane] = warp_sum - shared[lane];
  }
  __syncthreads();
  total = shared[WARPS];
  return shared[warp] + sum - value;
}

extern "C" __global__ void __launch_bounds__(THREADS) plan_decode(
    WorkItem* __restrict__ work, int* __restrict__ num_work,
    const int* seq_lens, const int* rows,
    int batch, int window, int items_at_once, int item_tokens, int max_items, int max_parts, int fixed_chunk)
{
  __shared__ int spans[THREADS];
  __shared__ u64 sums[WARPS + 1];
  __shared__ int costs[CANDIDATES];
  __shared__ int longest_of[WARPS], best_chunk;
  __shared__ u64 bucket_counts[BUCKETS * WARPS];
  const int i = threadIdx.x, warp = i >> 5, lane = i & 31;

  grid_dependency_wait();
  grid_dependency_launch();
  const int len = i < batch ? max(0, seq_lens[i]) : 0;
  const int begin = window > 0 ? max(0, len - window) : 0;
  const int base = begin & ~(TILE - 1);
  const int span = len - base;
  spans[i] = span;
  u64 tokens;
  exclusive_sum(span, sums, tokens);  // its barriers publish spans, too
  int longest = span;
  for (int d = 16; d > 0; d /= 2) longest = max(longest, __shfl_xor_sync(~0u, longest, d));
  if (lane == 0) longest_of[warp] = longest;
  __syncthreads();
  longest = longest_of[lane];
  for (int d = 16; d > 0; d /= 2) longest = max(longest, __shfl_xor_sync(~0u, longest, d));

  int chunk;
  if (fixed_chunk) {
    chunk = fixed_chunk_of(span);
  } else {
    for (int c = warp; c < CANDIDATES; c += WARPS) {
      const int size = max(MIN_CHUNK, round_up(ceil_div(longest, candidate_parts(c)), STEP));
      int items = 0, parts = 0;
      for (int row = lane; row < batch; row += 32) {
        const int n = max(1, ceil_div(spans[row], size));
        items += n;
        parts += n > 1 ? n : 0;
      }
      for (int d = 16; d > 0; d /= 2) {
        items += __shfl_xor_sync(~0u, items, d);
        parts += __shfl_xor_sync(~0u, parts, d);
      }
      if (lane == 0) {
        // 32-bit divisions: those of 64 bits were a third of this kernel's time
        const int waves = ceil_div(items, items_at_once), mean = (int)tokens / items;
        const int longest_parts = ceil_div(longest, size);
        const int cost = longest_parts > 1
            ? waves * (mean + item_tokens) + size - mean + item_tokens * 3 / 4 + longest_parts
            : max((int)tokens / items_at_once, longest / ALONE) + waves * item_tokens;
        costs[c] = items <= max_items && parts <= max_parts ? cost : INT_MAX;
      }
    }
    __syncthreads();
    if (warp == 0) {
      const int low = costs[lane], high = costs[lane + 32];
      int best = min(low, high);
      for (int d = 16; d > 0; d /= 2) best = min(best, __shfl_xor_sync(~0u, best, d));
      // of those within 2% of the best, the one with the fewest parts
      const u32 first_half = __ballot_sync(~0u, (i64)low * 50 <= (i64)best * 51);
      const u32 second_half = __ballot_sync(~0u, (i64)high * 50 <= (i64)best * 51);
      const int c = first_half ? __ffs(first_half) - 1 : 31 + __ffs(second_half);
      if (lane == 0) best_chunk = max(MIN_CHUNK, round_up(ceil_div(longest, candidate_parts(c)), STEP));
    }
    __syncthreads();
    chunk = best_chunk;
  }

  const bool real = i < batch;
  const int parts = real ? max(1, ceil_div(span, chunk)) : 0;
  const bool is_split = parts > 1;
  const int last_span = span - (parts - 1) * chunk;  // of the row's last item; the others are whole chunks

  // Before this row: whole chunks, parts of split rows, split rows, 21 bits each.
  constexpr u64 FIELD = (1 << 21) - 1;
  u64 totals;
  const u64 before = exclusive_sum(
      real ? (u64)(parts - 1) | (u64)(is_split ? parts : 0) << 21 | (u64)is_split << 42 : 0, sums, totals);
  const int first_whole = (int)(before & FIELD), first_part = (int)(before >> 21 & FIELD);
  const int split = (int)(before >> 42);
  const int num_whole = (int)(totals & FIELD);

  // Places of the last items, behind all whole chunks: by length in buckets, longest first, then by row.
  const int largest = max(1, min(longest, fixed_chunk ? fixed_chunk_of(longest) : chunk));
  const int bucket = real ? BUCKETS - 1 - last_span * (BUCKETS - 1) / largest : BUCKETS;
  const u32 peers = __match_any_sync(~0u, bucket);
  bucket_counts[lane * WARPS + warp] = 0;
  __syncwarp();
  const int rank = __popc(peers & ((1u << lane) - 1));
  if (real && rank == 0) bucket_counts[bucket * WARPS + warp] = __popc(peers);
  __syncthreads();
  u64 total_rows;
  const u64 rows_before = exclusive_sum(bucket_counts[i], sums, total_rows);
  __syncthreads();
  bucket_counts[i] = rows_before;
  __syncthreads();

  if (i == 0) *num_work = num_whole + batch;
  if (!real) return;
  WorkItem item;
  item.row = i;
  item.table_row = rows[i];
  item.first_part = is_split ? first_part : 0;
  item.num_parts = parts;
  item.split = is_split ? split : 0;
  for (int p = 0; p < parts; p++) {
    const bool is_last = p == parts - 1;
    item.begin = p == 0 ? begin : base + p * chunk;
    item.end = is_last ? len : base + (p + 1) * chunk;
    item.part = is_split ? first_part + p : -1;
    work[is_last ? num_whole + (int)bucket_counts[bucket * WARPS + warp] + rank : first_whole + p] = item;
  }
}
