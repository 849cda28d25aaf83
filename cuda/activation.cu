// out = f(gate) * up, elementwise, for gate and up side by side in [rows, 2 * INNER], or interleaved by eights.
//
//   -DSCALAR_* -DACTIVATION=silu | gelu_tanh | gelu
//   -DINNER=<a multiple of VEC>, or -DINTERLEAVED=1 for 16-bit types: a vector of gate, one of up, ...
//
// f's result is rounded to scalar_t before the product, as two separate torch operations would do.
#include "common/dependent_launch.cuh"
#include "common/dtype.cuh"
#include "common/gate.cuh"
#include "common/vec.cuh"

constexpr int THREADS = 128;
constexpr int PER_THREAD = 2;  // vectors; enough loads under way to hide memory latency

#ifdef INTERLEAVED
static_assert(VEC == 8, "a vector is a group of eight");
constexpr int UP = VEC;  // elements from a vector of gate to that of up
DEV i64 gate_offset(i64 v) { return 2 * v * VEC; }
#else
static_assert(INNER % VEC == 0, "rows are read 16 bytes at a time");
constexpr int ROW_VECS = INNER / VEC;  // a constant, so that dividing by it is cheap
constexpr int UP = INNER;
DEV i64 gate_offset(i64 v) { return (v + v / ROW_VECS * ROW_VECS) * VEC; }  // row * 2 * INNER + column
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
act_and_mul(const scalar_t* gate_up, scalar_t* __restrict__ out, i64 num_vecs) {
  const i64 first = (i64)blockIdx.x * (THREADS * PER_THREAD) + threadIdx.x;
  uint4 gate[PER_THREAD], up[PER_THREAD];
  grid_dependency_wait();
  grid_dependency_launch();
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const i64 v = first + i * THREADS;
    if (v >= num_vecs) break;
    const scalar_t* p = gate_up + gate_offset(v);
    gate[i] = load16(p);
    up[i] = load16(p + UP);
  }
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const i64 v = first + i * THREADS;
    if (v >= num_vecs) break;
    float g[VEC], u[VEC];
    unpack16(gate[i], g);
    unpack16(up[i], u);
#pragma unroll
    for (int e = 0; e < VEC; e++) g[e] = ACTIVATION(g[e]);
    round_all(g);
#pragma unroll
    for (int e = 0; e < VEC; e++) g[e] *= u[e];
    store16(out + v * VEC, pack16(g));
  }
}
