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

// What x would be after a trip through memory.
DEV float rounded(float x) { return to_float(from_float(x)); }
