// Philox4x32-10 and the noise of sampling, bit for bit those of engine/ops/philox.py, which documents
// the generator, the counters and the 48-bit uniform numbers.
#pragma once
#include "common/dtype.cuh"

constexpr u32 COARSE_STREAM = 0, FINE_STREAM = 1;  // last counter word

struct Words {
  u32 w[4];
};

// In plain C++ the compiler adds a zero to the high half of each product, an instruction more.
DEV u64 wide_product(u32 a, u32 b) {
#ifdef SLUICE_EMULATE
  return (u64)a * b;
#else
  u64 y;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(y) : "r"(a), "r"(b));
  return y;
#endif
}

// The four words of a counter (block, position, 0, stream). Positions are below 2**31.
DEV Words philox(u64 seed, u32 block, u32 position, u32 stream) {
  u32 c0 = block, c1 = position, c2 = 0, c3 = stream;
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 product_0 = wide_product(c0, 0xD2511F53u), product_1 = wide_product(c2, 0xCD9E8D57u);
    c0 = (u32)(product_1 >> 32) ^ c1 ^ k0;
    c1 = (u32)product_1;
    c2 = (u32)(product_0 >> 32) ^ c3 ^ k1;
    c3 = (u32)product_0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Coarse bits of token e of the eight of a block: e must be known to the compiler.
DEV u32 coarse_of(const Words& words, int e) { return (words.w[e >> 1] >> ((e & 1) * 16)) & 0xffffu; }

// words.w[i] for an i that only the running kernel knows, without a trip through memory.
DEV u32 pick(const Words& words, u32 i) {
  const u32 low = i & 1 ? words.w[1] : words.w[0], high = i & 1 ? words.w[3] : words.w[2];
  return i & 2 ? high : low;
}

DEV u32 coarse_bits(u64 seed, u32 position, u32 id) {
  const Words words = philox(seed, id >> 3, position, COARSE_STREAM);
  return (pick(words, (id & 7) >> 1) >> ((id & 1) * 16)) & 0xffffu;
}

// Standard Gumbel noise of a token.
DEV double token_noise(u64 seed, u32 position, u32 id) {
  const u64 coarse = coarse_bits(seed, position, id);
  const u64 fine = pick(philox(seed, id >> 2, position, FINE_STREAM), id & 3);
  const double u = ((double)(coarse << 32 | fine) + 0.5) * (1.0 / 281474976710656.0);
  return -log(-log1p(-u));
}

// --- Bounds from the coarse bits c alone, in float ---
//
// u lies in [c, c + 1) / 2**16, and -log(1 - u) >= u. So for c >= 1 the noise is at most
//     -log(c / 2**16)  <=  -log((c + 0.5) / 2**16) + log(1.5)
// and never below -log(-log(1 - (c + 1) / 2**16)). A token with c = 0 has no upper bound worth having.
constexpr float ESTIMATE_TO_BOUND = 0.4054651f;  // log(1.5)
constexpr float BOUND_SLACK = 1e-3f;             // far above the rounding of these floats

#ifdef SLUICE_EMULATE
DEV float fast_log2(float x) { return log2f(x); }
DEV float fast_exp2(float x) { return exp2f(x); }
#else
DEV float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

// Bounds of scores logit / T + noise that cost a multiplication of the logit: in units of log(2), and
// less by 16, the bound is logit * log2(e) / T - log2(c), or +infinity for c = 0. Its error, with that of
// the exact score's rounded division, is below BOUND_SLACK + |bound| * BOUND_ERROR: four roundings of
// 2**-24 of a product that is at most 16 more than the bound, which BOUND_ERROR takes four times, and
// 2**-22 * 16 of the logarithm. From LARGEST_PLAIN on a product might overflow.
constexpr float LOG2_E = 1.44269504f, BOUND_ERROR = 9.5367432e-7f;  // 2**-20
constexpr float LARGEST_PLAIN = 1e30f;

DEV float upper_score(float logit, float scale, u32 c) {
  const float coarse = __uint_as_float(0x4b000000u | c) - 8388608.f;  // exactly
  return fmaf(logit, scale, -fast_log2(coarse));
}
DEV float upper_unit(double score) { return (float)(score * (double)LOG2_E - 16.); }

DEV float noise_estimate(u32 c) {
  const float middle = __uint_as_float(0x4b000000u | c) - 8388607.5f;  // c + 0.5, exactly
  return -0.69314718f * (fast_log2(middle) - 16.f);
}
DEV float least_noise(u32 c) { return -logf(-log1pf((float)(c + 1) * -1.52587890625e-05f)); }
