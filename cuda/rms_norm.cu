// y = weight * x / sqrt(mean(x^2) + eps) for each row.
//
//   -DSCALAR_* -DHIDDEN=<row length, a multiple of VEC> -DTHREADS=<per row> -DROWS=<per block>
//
// A row stays in the registers of its THREADS threads: read once, written once.
//
//   THREADS = 32: a warp for each row, ROWS rows in a block.   Else one row in a block.
//   thread t holds the vectors t, t + THREADS, ...: neighbours read neighbouring 16 bytes
#include "common/dependent_launch.cuh"
#include "common/dtype.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

constexpr int VECS = HIDDEN / VEC;
constexpr int PER_THREAD = (VECS + THREADS - 1) / THREADS;
static_assert(HIDDEN % VEC == 0, "rows are read 16 bytes at a time");
static_assert(THREADS % 32 == 0 && (THREADS == 32 || ROWS == 1), "a row belongs to a warp or a block");

// The part of a row that one thread holds.
struct RowPart {
  uint4 data[PER_THREAD];
};

DEV bool has_vec(int thread, int i) {
  // the compiler drops the test for all but the last i
  return (i + 1) * THREADS <= VECS || thread + i * THREADS < VECS;
}

DEV void load_row(RowPart& part, const scalar_t* row, int thread) {
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    part.data[i] = has_vec(thread, i) ? load16(row + (thread + i * THREADS) * VEC)
                                      : make_uint4(0, 0, 0, 0);
  }
}

DEV void set_row_to_one(RowPart& part) {
  float ones[VEC];
#pragma unroll
  for (int e = 0; e < VEC; e++) ones[e] = 1.f;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) part.data[i] = pack16(ones);
}

// x [rows, HIDDEN] with x_stride elements from row to row; weight [HIDDEN], or null for ones;
// y [rows, HIDDEN] contiguous.
extern "C" __global__ void __launch_bounds__(THREADS* ROWS)
rms_norm(const scalar_t* x, const scalar_t* __restrict__ weight,
         scalar_t* __restrict__ y, i64 x_stride, int num_rows, float eps) {
  __shared__ float partial[32];
  const int row = blockIdx.x * ROWS + threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
  if (row >= num_rows) return;
  RowPart part, w;
  if (weight != nullptr) {
    load_row(w, weight, thread);
  } else {
    set_row_to_one(w);
  }
  grid_dependency_wait();
  grid_dependency_launch();
  load_row(part, x + row * x_stride, thread);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    float v[VEC];
    unpack16(part.data[i], v);
#pragma unroll
    for (int e = 0; e < VEC; e++) sum += v[e] * v[e];
  }
  sum = THREADS == 32 ? warp_sum(sum) : block_sum<THREADS>(sum, partial);
  const float scale = rsqrtf(sum / HIDDEN + eps);
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    if (!has_vec(thread, i)) continue;
    float v[VEC], g[VEC];
    unpack16(part.data[i], v);
    unpack16(w.data[i], g);
#pragma unroll
    for (int e = 0; e < VEC; e++) v[e] *= scale;
    round_all(v);
#pragma unroll
    for (int e = 0; e < VEC; e++) v[e] *= g[e];
    store16(y + (i64)row * HIDDEN + (thread + i * THREADS) * VEC, pack16(v));
  }
}
