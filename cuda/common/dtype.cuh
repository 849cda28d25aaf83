// The model's number type, chosen by a macro, and conversions to and from float.
//
//   -DSCALAR_BF16=1 | -DSCALAR_FP16=1 | -DSCALAR_FP32=1
//
// scalar_t is storage (bits), not arithmetic: kernels compute in float. Conversions round to nearest
// even, as torch's do. Under SLUICE_EMULATE (tests/kernels/cuda_emu.h) plain C++ takes the place of PTX.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEV __device__ __forceinline__

// --- bfloat16 and float16, under names of their own for kernels that need both ---

DEV float bf16_to_float(u16 x) { return __uint_as_float((u32)x << 16); }

#ifdef SLUICE_EMULATE

DEV u16 float_to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
DEV u32 pack_bf16(float lo, float hi) { return float_to_bf16(lo) | (u32)float_to_bf16(hi) << 16; }

DEV float fp16_to_float(u16 x) {
  _Float16 h;
  __builtin_memcpy(&h, &x, 2);
  return (float)h;
}
DEV u16 float_to_fp16(float x) {
  if (x != x) return 0x7fff;  // a GPU's, whatever the sign and the bits
  const _Float16 h = (_Float16)x;
  u16 bits;
  __builtin_memcpy(&bits, &h, 2);
  return bits;
}
DEV u32 pack_fp16(float lo, float hi) { return float_to_fp16(lo) | (u32)float_to_fp16(hi) << 16; }

#else

DEV u16 float_to_bf16(float x) {
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
DEV u32 pack_bf16(float lo, float hi) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

DEV float fp16_to_float(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
DEV u16 float_to_fp16(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
DEV u32 pack_fp16(float lo, float hi) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

#endif

DEV void unpack_bf16(u32 x, float& lo, float& hi) {
  lo = __uint_as_float(x << 16);
  hi = __uint_as_float(x & 0xffff0000u);
}
DEV void unpack_fp16(u32 x, float& lo, float& hi) {
  lo = fp16_to_float((u16)(x & 0xffff));
  hi = fp16_to_float((u16)(x >> 16));
}

// --- scalar_t. pack2 and unpack2 (low half: the element at the lower address) exist for 16 bits ---

#if defined(SCALAR_BF16)

typedef u16 scalar_t;
DEV float to_float(scalar_t x) { return bf16_to_float(x); }
DEV scalar_t from_float(float x) { return float_to_bf16(x); }
DEV u32 pack2(float lo, float hi) { return pack_bf16(lo, hi); }
DEV void unpack2(u32 x, float& lo, float& hi) { unpack_bf16(x, lo, hi); }

#elif defined(SCALAR_FP16)

typedef u16 scalar_t;
DEV float to_float(scalar_t x) { return fp16_to_float(x); }
DEV scalar_t from_float(float x) { return float_to_fp16(x); }
DEV u32 pack2(float lo, float hi) { return pack_fp16(lo, hi); }
DEV void unpack2(u32 x, float& lo, float& hi) { unpack_fp16(x, lo, hi); }

#elif defined(SCALAR_FP32)

typedef float scalar_t;
DEV float to_float(scalar_t x) { return x; }
DEV scalar_t from_float(float x) { return x; }

#endif

// --- 8-bit floats of a quantised KV cache: round to nearest even, too large becomes the largest ---

#if defined(SLUICE_EMULATE) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890)

// MANTISSA bits, exponent BIAS; LARGEST is the code of the largest finite value, LARGEST_BITS its float.
template <int MANTISSA, int BIAS, u32 LARGEST, u32 LARGEST_BITS>
DEV u32 float_to_fp8(float x) {
  constexpr int SHIFT = 23 - MANTISSA;
  const u32 bits = __float_as_uint(x), size = bits & 0x7fffffffu, sign = (bits >> 24) & 0x80u;
  if (size > 0x7f800000u) return sign | 0x7fu;  // NaN
  if (size >= LARGEST_BITS) return sign | LARGEST;
  if (size < (u32)(128 - BIAS) << 23) {  // subnormal: a multiple of 2^(1 - BIAS - MANTISSA)
    constexpr u32 unit = (u32)(127 + BIAS + MANTISSA - 1) << 23;
    return sign | (u32)__float2int_rn(__uint_as_float(size) * __uint_as_float(unit));
  }
  const u32 rounded = size + ((1u << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1);
  return sign | ((rounded >> SHIFT) - ((127 - BIAS) << MANTISSA));
}
DEV u32 pack_e4m3(float lo, float hi) {
  return float_to_fp8<3, 7, 0x7e, 0x43e00000u>(lo) | float_to_fp8<3, 7, 0x7e, 0x43e00000u>(hi) << 8;
}
DEV u32 pack_e5m2(float lo, float hi) {
  return float_to_fp8<2, 15, 0x7b, 0x47600000u>(lo) | float_to_fp8<2, 15, 0x7b, 0x47600000u>(hi) << 8;
}

#else

DEV u32 pack_e4m3(float lo, float hi) {
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
  return y;
}
DEV u32 pack_e5m2(float lo, float hi) {
  u16 y;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
  return y;
}

#endif
