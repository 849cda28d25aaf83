// Results of a row's parts, which several thread blocks of one launch leave in global memory, and one merges.
#pragma once
#include "common/dtype.cuh"

struct alignas(16) Float4 { float x, y, z, w; };

#ifdef SLUICE_EMULATE
DEV Float4 load_float4_l2(const float* p) { return *(const Float4*)p; }
DEV float load_float_l2(const float* p) { return *p; }
#else
// From L2: other thread blocks have just written it.
DEV Float4 load_float4_l2(const float* p) {
  Float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}
DEV float load_float_l2(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
#endif

DEV void store_scalars(scalar_t* to, Float4 v) {
  struct Pair { u32 lo, hi; };
  *(Pair*)to = Pair{pack2(v.x, v.y), pack2(v.z, v.w)};
}

// Weighted sum of `count` parts' O, stride floats apart, for four columns.
DEV Float4 merge_parts(const float* o, const float* weights, int count, int stride) {
  Float4 sum = {0.f, 0.f, 0.f, 0.f};
  #pragma unroll 8
  for (int i = 0; i < count; i++) {
    const float w = weights[i];
    const Float4 part = load_float4_l2(o + (long long)i * stride);
    sum.x += w * part.x;
    sum.y += w * part.y;
    sum.z += w * part.z;
    sum.w += w * part.w;
  }
  return sum;
}
