// Matrix products of one warp on tensor cores (mma.sync) and the loads that feed them (ldmatrix), for
// sm_80 and later. With lane = 4 * g + t (g in 0..7, t in 0..3), m16n8k16 spreads its matrices so:
//
//   A [16, 16]  a[0] (row g, columns 2t, 2t + 1)      a[2] (row g, columns 2t + 8, 2t + 9)
//               a[1] (row g + 8, the same)            a[3] (row g + 8, the same)
//   B [16, 8]   b0 (rows 2t, 2t + 1, column g)        b1 (rows 2t + 8, 2t + 9, column g)
//   C [16, 8]   c[0], c[1] (row g, columns 2t, 2t + 1)   c[2], c[3] (row g + 8, the same)
//
// Two numbers of 16 bits share a register, the first in its low half. So C of one product, packed to 16
// bits, is A of the next: columns 8n .. 8n + 15 of C are a[0..3] from c of tile n and of tile n + 1.
#pragma once
#include "async_copy.cuh"

#ifdef SLUICE_EMULATE

// In terms of warp shuffles.
DEV int emulated_lane() { return threadIdx.x & 31; }

template <bool TRANSPOSED, int COUNT> DEV void emulated_ldmatrix(u32* r, smem_t address) {
  const int g = emulated_lane() >> 2, t = emulated_lane() & 3;
  for (int i = 0; i < COUNT; i++) {
    u16 pair[2];
    for (int e = 0; e < 2; e++) {
      const int row = TRANSPOSED ? 2 * t + e : g, column = TRANSPOSED ? g : 2 * t + e;
      const smem_t from = __shfl_sync(~0u, address, 8 * i + row);
      __builtin_memcpy(&pair[e], (const void*)(from + 2 * column), 2);
    }
    r[i] = pair[0] | (u32)pair[1] << 16;
  }
}
DEV void ldmatrix_x4(u32 (&r)[4], smem_t address) { emulated_ldmatrix<false, 4>(r, address); }
DEV void ldmatrix_x2(u32 (&r)[4], smem_t address) { emulated_ldmatrix<false, 2>(r, address); }
DEV void ldmatrix_x4_transposed(u32 (&r)[4], smem_t address) { emulated_ldmatrix<true, 4>(r, address); }
DEV void ldmatrix_x2_transposed(u32 (&r)[4], smem_t address) { emulated_ldmatrix<true, 2>(r, address); }

// Products are summed in k's order.
template <void UNPACK(u32, float&, float&)>
DEV void emulated_mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const int g = emulated_lane() >> 2, t = emulated_lane() & 3;
  u64 rows[2][4], columns[2][4];  // of k pairs: row g and (high half) g + 8; column 2t + e, k + 8 high
  for (int pair = 0; pair < 4; pair++) {
    rows[0][pair] = __shfl_sync(~0u, a[0] | (u64)a[1] << 32, 4 * g + pair);
    rows[1][pair] = __shfl_sync(~0u, a[2] | (u64)a[3] << 32, 4 * g + pair);
    for (int e = 0; e < 2; e++) columns[e][pair] = __shfl_sync(~0u, b0 | (u64)b1 << 32, 4 * (2 * t + e) + pair);
  }
  for (int half = 0; half < 2; half++)
    for (int pair = 0; pair < 4; pair++) {
      float x[2], y[2], z[2];
      UNPACK((u32)rows[half][pair], x[0], x[1]);
      UNPACK((u32)(rows[half][pair] >> 32), y[0], y[1]);
      for (int e = 0; e < 2; e++) {
        UNPACK((u32)(columns[e][pair] >> 32 * half), z[0], z[1]);
        c[e] += x[0] * z[0] + x[1] * z[1];
        c[2 + e] += y[0] * z[0] + y[1] * z[1];
      }
    }
}
DEV void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { emulated_mma<unpack_bf16>(c, a, b0, b1); }
DEV void mma_fp16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { emulated_mma<unpack_fp16>(c, a, b0, b1); }

DEV u32 transpose_8x8(u32 pair) {
  const int g = emulated_lane() >> 2, t = emulated_lane() & 3;
  u32 result = 0;
  for (int e = 0; e < 2; e++)
    result |= (__shfl_sync(~0u, pair, 4 * (2 * t + e) + g / 2) >> 16 * (g & 1) & 0xffff) << 16 * e;
  return result;
}

DEV float exp2_fast(float x) { return __builtin_exp2f(x); }
DEV float log2_fast(float x) { return __builtin_log2f(x); }
DEV float reciprocal_fast(float x) { return 1.f / x; }

#else

// Matrices of 8 rows of 16 bytes: register i gets matrix i, laid out as a quarter of A. Lane 8 * i + j
// holds the address of row j of matrix i. Transposed: rows and columns of 16-bit numbers swap.
DEV void ldmatrix_x4(u32 (&r)[4], smem_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
DEV void ldmatrix_x4_transposed(u32 (&r)[4], smem_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
// Two matrices, into r[0] and r[1]; the addresses of lanes 16 to 31 are not used.
DEV void ldmatrix_x2(u32 (&r)[4], smem_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(address));
}
DEV void ldmatrix_x2_transposed(u32 (&r)[4], smem_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(address));
}

// c += A B
DEV void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV void mma_fp16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A matrix of 8 x 8 numbers of 16 bits: lane 4 * g + t has columns 2t and 2t + 1 of row g, and gets those of
// its transpose.
DEV u32 transpose_8x8(u32 pair) {
  u32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Of the special function unit: about 22 good bits, denormals are zero.
DEV float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif

// Four lanes of a quad hold words v[0..3] each; afterwards lane t holds word t of lanes 0 ... 3.
DEV void transpose_quad(u32 (&v)[4], int t) {
  const bool odd = t & 1, high = t & 2;
  for (int i = 0; i < 4; i += 2) {
    const u32 got = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 1], 1);
    if (odd) v[i] = got; else v[i + 1] = got;
  }
  for (int i = 0; i < 2; i++) {
    const u32 got = __shfl_xor_sync(~0u, high ? v[i] : v[i + 2], 2);
    if (high) v[i] = got; else v[i + 2] = got;
  }
}
