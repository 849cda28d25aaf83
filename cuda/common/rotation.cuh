// Norm and rotation of one head of q or k, and how it is stored: what rope_and_cache.cu and paged_decode.cu have
// in common, so that both give the same bits.
//
//   -DHEAD_DIM=<multiple of 16>   -DROPE_FP32=0 | 1 (type of cos and sin)   and of kv_type.cuh: -DKV_...
//
// HEAD_LANES lanes have one head; a lane has 8 elements of the head's first half and the 8 that they are
// rotated with, half a head further on:
//
//   head   | lane 0 | lane 1 | ... | lane 0 | lane 1 | ... |       8 elements each
//          |<---- HEAD_DIM / 2 --->|<---- HEAD_DIM / 2 --->|
//
// HEAD_LANES is a power of two so that lanes can add up; at head sizes 80, 96 and the like some are idle.
//
// Sums of products are spelled out: left to the compiler, each kernel could fuse others of them.
#pragma once
#include "common/dtype.cuh"
#include "common/kv_type.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

constexpr int HALF = HEAD_DIM / 2;
constexpr int BUSY_LANES = HALF / 8;  // that have elements
constexpr int HEAD_LANES =
    BUSY_LANES <= 2 ? 2 : BUSY_LANES <= 4 ? 4 : BUSY_LANES <= 8 ? 8 : BUSY_LANES <= 16 ? 16 : 32;
static_assert(HEAD_DIM % 16 == 0 && BUSY_LANES <= 32, "a lane has 8 elements of each half of a head");

struct HeadPart { float a[8], b[8]; };  // of the first half and of the second
struct StoredPart { Eight a, b; };      // the same as it lies in memory
struct Angles { float cos[8], sin[8]; };

#if ROPE_FP32
typedef float angle_t;
DEV void load_angle8(const angle_t* p, float (&x)[8]) {
  const float4 a = *(const float4*)p, b = *(const float4*)(p + 4);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
#else
typedef scalar_t angle_t;
DEV void load_angle8(const angle_t* p, float (&x)[8]) { unpack8(load8(p), x); }
#endif

// Those of a token's lane, whose elements start at `from`.
DEV Angles load_angles(const angle_t* cos, const angle_t* sin, i64 from) {
  Angles angles;
  load_angle8(cos + from, angles.cos);
  load_angle8(sin + from, angles.sin);
  return angles;
}

// `p`: the lane's first element in the head.
DEV StoredPart load_stored(const scalar_t* p) { return {load8(p), load8(p + HALF)}; }
DEV HeadPart unpack_head(const StoredPart& stored) {
  HeadPart x;
  unpack8(stored.a, x.a);
  unpack8(stored.b, x.b);
  return x;
}
DEV HeadPart load_head(const scalar_t* p) { return unpack_head(load_stored(p)); }

// RMS norm over the head: its factor, found by all lanes of a warp at once, then what it makes of a lane's numbers.
DEV float norm_factor(const HeadPart& x, float eps) {
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < 8; e++) sum = __fmaf_rn(x.a[e], x.a[e], __fmaf_rn(x.b[e], x.b[e], sum));
  return rsqrtf(__fadd_rn(warp_sum<HEAD_LANES>(sum) / HEAD_DIM, eps));
}
DEV void apply_norm(HeadPart& x, float factor, const HeadPart& weight) {
#pragma unroll
  for (int e = 0; e < 8; e++) {
    x.a[e] = rounded(rounded(x.a[e] * factor) * weight.a[e]);
    x.b[e] = rounded(rounded(x.b[e] * factor) * weight.b[e]);
  }
}

// Both. `weight`: of the lane's first element, or null: the lane's numbers stay.
DEV void norm_head(HeadPart& x, const scalar_t* weight, float eps) {
  const float factor = norm_factor(x, eps);
  if (weight != nullptr) apply_norm(x, factor, load_head(weight));
}

DEV void rotate(HeadPart& x, const Angles& angles) {
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const float a = x.a[e], b = x.b[e], c = angles.cos[e], s = angles.sin[e];
    x.a[e] = __fmaf_rn(a, c, -__fmul_rn(b, s));
    x.b[e] = __fmaf_rn(b, c, __fmul_rn(a, s));
  }
}

DEV void store_kv8(kv_t* p, const float (&x)[8], float inverse_scale) {
#if KV_FP8
  float y[8];
#pragma unroll
  for (int e = 0; e < 8; e++) y[e] = x[e] * inverse_scale;
#if defined(KV_E4M3)
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

// `p`: where the lane's first element of a head of the cache goes.
DEV void store_kv(kv_t* p, const HeadPart& x, float inverse_scale) {
  store_kv8(p, x.a, inverse_scale);
  store_kv8(p + HALF, x.b, inverse_scale);
}
