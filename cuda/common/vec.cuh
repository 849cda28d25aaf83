// Sixteen bytes at a time: the widest access of a thread, and what it takes to fill a memory bus.
//
// Addresses are multiples of 16. Include after choosing scalar_t (dtype.cuh).
#pragma once
#include "common/dtype.cuh"

constexpr int VEC = 16 / sizeof(scalar_t);  // elements in 16 bytes

DEV uint4 load16(const void* p) { return *(const uint4*)p; }
DEV void store16(void* p, uint4 v) { *(uint4*)p = v; }

#if defined(SCALAR_FP32)

DEV void unpack16(const uint4& v, float (&x)[VEC]) {
  x[0] = __uint_as_float(v.x);
  x[1] = __uint_as_float(v.y);
  x[2] = __uint_as_float(v.z);
  x[3] = __uint_as_float(v.w);
}
DEV uint4 pack16(const float (&x)[VEC]) {
  return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                    __float_as_uint(x[3]));
}

#else

DEV void unpack16(const uint4& v, float (&x)[VEC]) {
  unpack2(v.x, x[0], x[1]);
  unpack2(v.y, x[2], x[3]);
  unpack2(v.z, x[4], x[5]);
  unpack2(v.w, x[6], x[7]);
}
DEV uint4 pack16(const float (&x)[VEC]) {
  return make_uint4(pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7]));
}

#endif

// Eight elements: one vector of 16-bit ones, two of floats.
struct Eight {
  uint4 vec[8 / VEC];
};
DEV Eight load8(const scalar_t* p) {
  Eight v;
#pragma unroll
  for (int i = 0; i < 8 / VEC; i++) v.vec[i] = load16(p + i * VEC);
  return v;
}
DEV void unpack8(const Eight& v, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8 / VEC; i++) {
    float part[VEC];
    unpack16(v.vec[i], part);
#pragma unroll
    for (int e = 0; e < VEC; e++) x[i * VEC + e] = part[e];
  }
}
DEV void store8(scalar_t* p, const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8 / VEC; i++) {
    float part[VEC];
#pragma unroll
    for (int e = 0; e < VEC; e++) part[e] = x[i * VEC + e];
    store16(p + i * VEC, pack16(part));
  }
}

// What x would be after a trip through memory. Conversions of two numbers at once are several times faster.
DEV float rounded(float x) { return to_float(from_float(x)); }
DEV void round_all(float (&x)[VEC]) { unpack16(pack16(x), x); }
