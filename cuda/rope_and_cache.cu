// Per-head norm of q and k (optional), rotation by position, keys and values into the paged KV cache:
// one pass over the output of the qkv projection.
//
//   -DSCALAR_* -DHEAD_DIM=<multiple of 16> -DBLOCK_SIZE=<tokens in a block of the cache>
//   -DQK_NORM=0 | 1   -DROPE_FP32=0 | 1 (type of cos and sin)   -DKV_FP8=0 | 1 (e4m3) | 2 (e5m2)
//
// Grid: (T, as many blocks as the heads of a token need). A group of GROUP lanes has one head; a lane has
// 8 elements of the head's first half and the 8 that they are rotated with, half a head further on:
//
//   head   | lane 0 | lane 1 | ... | lane 0 | lane 1 | ... |       8 elements each
//          |<---- HEAD_DIM / 2 --->|<---- HEAD_DIM / 2 --->|
//
// GROUP is a power of two so that lanes can add up; at head sizes 80, 96 and the like some are idle.
#include "common/dependent_launch.cuh"
#include "common/dtype.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

constexpr int HALF = HEAD_DIM / 2;
constexpr int LANES = HALF / 8;  // that have elements
constexpr int GROUP = LANES <= 2 ? 2 : LANES <= 4 ? 4 : LANES <= 8 ? 8 : LANES <= 16 ? 16 : 32;
static_assert(HEAD_DIM % 16 == 0 && LANES <= 32, "a lane has 8 elements of each half of a head");

#if KV_FP8
typedef u8 kv_t;
#else
typedef scalar_t kv_t;
#endif

#if ROPE_FP32
DEV void load_angles(const void* row, int i, float (&x)[8]) {
  const float4 a = *(const float4*)((const float*)row + i), b = *(const float4*)((const float*)row + i + 4);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
constexpr int ANGLE_BYTES = 4;
#else
DEV void load_angles(const void* row, int i, float (&x)[8]) { unpack8(load8((const scalar_t*)row + i), x); }
constexpr int ANGLE_BYTES = sizeof(scalar_t);
#endif

DEV void store_kv(kv_t* p, const float (&x)[8], float inverse_scale) {
#if KV_FP8
  float y[8];
#pragma unroll
  for (int e = 0; e < 8; e++) y[e] = x[e] * inverse_scale;
#if KV_FP8 == 1
  const u32 lo = pack_e4m3(y[0], y[1]) | pack_e4m3(y[2], y[3]) << 16;
  const u32 hi = pack_e4m3(y[4], y[5]) | pack_e4m3(y[6], y[7]) << 16;
#else
  const u32 lo = pack_e5m2(y[0], y[1]) | pack_e5m2(y[2], y[3]) << 16;
  const u32 hi = pack_e5m2(y[4], y[5]) | pack_e5m2(y[6], y[7]) << 16;
#endif
  *(uint2*)p = make_uint2(lo, hi);
#else
  store8(p, x);
#endif
}

extern "C" __global__ void __launch_bounds__(256, 4)
rope_and_cache(const scalar_t* qkv,  // [T, num_heads + 2 * num_kv_heads, HEAD_DIM]
               const void* __restrict__ cos,      // [T, >= HALF], angle_stride elements from row to row
               const void* __restrict__ sin,      // likewise
               const i64* __restrict__ slots,     // [T]
               const scalar_t* __restrict__ qk_norm,  // [num_heads + num_kv_heads, HEAD_DIM] if QK_NORM
               scalar_t* __restrict__ q_out,          // [T, num_heads, HEAD_DIM]
               kv_t* __restrict__ k_cache,  // [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
               kv_t* __restrict__ v_cache, i64 qkv_stride, i64 angle_stride, int num_heads,
               int num_kv_heads, float eps, float inverse_k_scale, float inverse_v_scale) {
  const i64 token = blockIdx.x;
  const int item = blockIdx.y * blockDim.x + threadIdx.x;
  const int head = item / GROUP, lane = item % GROUP, element = lane * 8;
  const int num_rotated = num_heads + num_kv_heads;
  // whole warps go on, for the sums over lanes
  const bool active = lane < LANES && head < num_rotated + num_kv_heads;
  const bool is_rotated = active && head < num_rotated;

  // all loads first, so that their latencies overlap; only qkv comes from the kernel just before
  const i64 slot = slots[token];
  float c[8], s[8];
  if (is_rotated) {
    load_angles((const u8*)cos + token * angle_stride * ANGLE_BYTES, element, c);
    load_angles((const u8*)sin + token * angle_stride * ANGLE_BYTES, element, s);
  }
  grid_dependency_wait();
  grid_dependency_launch();
  Eight first_half = {}, second_half = {};
  if (active) {
    const scalar_t* p = qkv + token * qkv_stride + head * HEAD_DIM + element;
    first_half = load8(p);
    second_half = load8(p + HALF);
  }
  float a[8], b[8];
  unpack8(first_half, a);
  unpack8(second_half, b);

  if (QK_NORM) {
    float sum = 0.f;
#pragma unroll
    for (int e = 0; e < 8; e++) sum += a[e] * a[e] + b[e] * b[e];
    const float scale = rsqrtf(warp_sum<GROUP>(sum) / HEAD_DIM + eps);
    if (is_rotated) {
      float ga[8], gb[8];
      unpack8(load8(qk_norm + head * HEAD_DIM + element), ga);
      unpack8(load8(qk_norm + head * HEAD_DIM + element + HALF), gb);
#pragma unroll
      for (int e = 0; e < 8; e++) {
        a[e] = rounded(rounded(a[e] * scale) * ga[e]);
        b[e] = rounded(rounded(b[e] * scale) * gb[e]);
      }
    }
  }
  if (!active) return;

  if (is_rotated) {
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const float x = a[e], y = b[e];
      a[e] = x * c[e] - y * s[e];
      b[e] = y * c[e] + x * s[e];
    }
  }
  if (head < num_heads) {
    scalar_t* p = q_out + (token * num_heads + head) * HEAD_DIM + element;
    store8(p, a);
    store8(p + HALF, b);
    return;
  }
  const i64 block = slot / BLOCK_SIZE, offset = slot % BLOCK_SIZE;
  const bool is_key = is_rotated;
  const int kv_head = head - (is_key ? num_heads : num_rotated);
  const float inverse_scale = is_key ? inverse_k_scale : inverse_v_scale;
  kv_t* p = (is_key ? k_cache : v_cache) +
            ((block * num_kv_heads + kv_head) * BLOCK_SIZE + offset) * HEAD_DIM + element;
  store_kv(p, a, inverse_scale);
  store_kv(p + HALF, b, inverse_scale);
}
