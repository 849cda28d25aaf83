// Tiles of the KV cache in shared memory, and the tensor core operands made of them.
//
//   -DHEAD_DIM=64 | 80 | 96 | 128 | 256 ...   a multiple of 16   and of kv_type.cuh: -DKV_...
//
// A tile is rows of one token each. Row r, 16-byte chunk c lies where no two of eight consecutive rows
// share banks: chunks are exchanged by c ^ (r & 7) if a row is a multiple of 128 bytes, by c ^ (r / 2 & 3) if it
// is one of 64 bytes, and rows are an odd number of chunks apart otherwise.
//
// 8-bit numbers become fp16 in registers (exactly), and the products are fp16's. A 32-bit register then
// holds four numbers, where two are expected, and instead of shuffling them we let the columns of a
// group of 16 take other places: among the k of the first product, where Q follows (query_column), and
// among the columns of the second (output_column).
#pragma once
#include "common/kv_type.cuh"
#include "mma.cuh"

// Places of 16-byte chunks in a tile whose rows have `BYTES` bytes.
template <int BYTES> struct TileLayout {
  static constexpr int CHUNKS = BYTES / 16;
  static constexpr int EXCHANGED = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 0;  // chunks, within each other
  static constexpr int PAIRS = EXCHANGED ? EXCHANGED / 2 : 1;
  static constexpr int STRIDE = (EXCHANGED ? CHUNKS : CHUNKS | 1) * 16;  // bytes from row to row

  static DEV u32 offset(int row, int chunk) {
    return row * STRIDE + ((EXCHANGED == 8 ? chunk ^ (row & 7) : EXCHANGED == 4 ? chunk ^ (row >> 1 & 3) : chunk) << 4);
  }
  // For ldmatrix of 16 rows and two chunks: lanes 0 to 15 point to the rows' first chunk, the others to
  // the second. That of chunks 0 and 1, to be added to the address of the first row (a multiple of 128):
  static DEV u32 lane_offset(int lane) { return offset(lane & 15, lane >> 4); }
  // ... and from there to chunks 2 * pair and 2 * pair + 1, with next to no arithmetic.
  static DEV smem_t at(smem_t lane_address, int pair) {
    return EXCHANGED ? (lane_address ^ (pair % PAIRS << 5)) + pair / PAIRS * PAIRS * 32 : lane_address + pair * 32;
  }
};

constexpr int KV_ROW_BYTES = HEAD_DIM * sizeof(kv_t);
typedef TileLayout<KV_ROW_BYTES> KvLayout;
typedef TileLayout<HEAD_DIM * 2> QueryLayout;

constexpr int K_STEPS = HEAD_DIM / 16;   // of the first product
constexpr int N_TILES = HEAD_DIM / 8;    // column tiles of the second
constexpr int LOADS = (KvLayout::CHUNKS + 1) / 2;  // a load takes two chunks of 16 tokens; the last may take one
constexpr int K_STEPS_PER_LOAD = KV_FP8 ? 2 : 1;
constexpr int N_TILES_PER_LOAD = KV_FP8 ? 4 : 2;
static_assert(HEAD_DIM % 16 == 0, "head sizes are multiples of 16");

// --- operand numbers: the cache's, or fp16 ---

#if KV_FP8 || defined(SCALAR_FP16)
DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_fp16(c, a, b0, b1); }
DEV u32 pack_operand(float lo, float hi) { return pack_fp16(lo, hi); }
#else
DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(c, a, b0, b1); }
DEV u32 pack_operand(float lo, float hi) { return pack_bf16(lo, hi); }
#endif

// Two scalars of a query as operands.
DEV u32 query_operand(u32 pair) {
#if KV_FP8 && defined(SCALAR_BF16)
  float lo, hi;
  unpack_bf16(pair, lo, hi);
  return pack_fp16(lo, hi);
#else
  return pair;
#endif
}

// Before sm_89 there is no conversion instruction. e4m3's bits, moved into fp16's places, are the number
// times 2^(7 - 15): scales make up for it.
#if defined(KV_E4M3) && (defined(SLUICE_EMULATE) || __CUDA_ARCH__ < 890)
#define KV_E4M3_BY_BITS 1
constexpr float KV_UNIT = 256.f;
#else
constexpr float KV_UNIT = 1.f;
#endif

// Bytes `first` and `second` (constants) of `four` as two fp16 numbers, in units of KV_UNIT.
DEV u32 fp8_operand(u32 four, int first, int second) {
#if defined(KV_E5M2)
  return __byte_perm(four, 0, second << 12 | 4 << 8 | first << 4 | 4);  // bytes: 0, first, 0, second
#elif defined(KV_E4M3_BY_BITS)
  const u32 pair = __byte_perm(four, 0, second << 12 | 4 << 8 | first << 4 | 4);
  return (pair & 0x80008000u) | ((pair & 0x7f007f00u) >> 1);
#elif defined(KV_E4M3)
  u32 pair;
  asm("{\n.reg .b16 two;\ncvt.u16.u32 two, %1;\ncvt.rn.f16x2.e4m3x2 %0, two;\n}"
      : "=r"(pair) : "r"(__byte_perm(four, 0, 0x4400 | second << 4 | first)));
  return pair;
#else
  return four;  // never called
#endif
}

// All of `four` as two operands: bytes 0, 1 and bytes 2, 3, or if ALTERNATE bytes 0, 2 and bytes 1, 3.
template <bool ALTERNATE> DEV void fp8_operands(u32 four, u32& first, u32& second) {
#if defined(KV_E4M3) && !defined(KV_E4M3_BY_BITS)
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.rn.f16x2.e4m3x2 %0, lo;\ncvt.rn.f16x2.e4m3x2 %1, hi;\n}"
      : "=r"(first), "=r"(second) : "r"(ALTERNATE ? __byte_perm(four, 0, 0x3120) : four));
#else
  first = fp8_operand(four, 0, ALTERNATE ? 2 : 1);
  second = fp8_operand(four, ALTERNATE ? 1 : 2, 3);
#endif
}

// --- operands of S = Q K^T: load `l` of 16 tokens gives K_STEPS_PER_LOAD steps. `address` of tile rows: with
// the lane's KvLayout::lane_offset ---

struct KeyFragment {
  u32 raw[4];  // first chunk of tokens 0 to 7, of tokens 8 to 15, then the second chunk

  DEV void load(smem_t address, int l) {
    if (2 * l + 1 < KvLayout::CHUNKS)
      ldmatrix_x4(raw, KvLayout::at(address, l));
    else
      ldmatrix_x2(raw, KvLayout::at(address, l));
  }
  // s0 (tokens 0 to 7), s1 (tokens 8 to 15) += the part of the load's k step `step`, with the queries' a.
  DEV void multiply(int step, float (&s0)[4], float (&s1)[4], const u32 (&a)[4]) const {
#if KV_FP8
    const u32 x0 = raw[2 * step], x1 = raw[2 * step + 1];
    mma(s0, a, fp8_operand(x0, 0, 1), fp8_operand(x0, 2, 3));
    mma(s1, a, fp8_operand(x1, 0, 1), fp8_operand(x1, 2, 3));
#else
    mma(s0, a, raw[0], raw[2]);
    mma(s1, a, raw[1], raw[3]);
#endif
  }
  // The 16 tokens at the load's k step `step` as the left operand, of S^T = K Q^T.
  DEV void left_operand(int step, u32 (&a)[4]) const {
#if KV_FP8
    fp8_operands<false>(raw[2 * step], a[0], a[2]);
    fp8_operands<false>(raw[2 * step + 1], a[1], a[3]);
#else
    a[0] = raw[0], a[1] = raw[1], a[2] = raw[2], a[3] = raw[3];
#endif
  }
};

// Column of the head that stands at k = 2t (half 0) or 2t + 8 (half 1) of a k step, followed by the next.
DEV int query_column(int k_step, int t, int half) {
  return KV_FP8 ? 16 * k_step + 4 * t + 2 * half : 16 * k_step + 2 * t + 8 * half;
}

// --- operands of O += P V: load `l` of 16 tokens gives N_TILES_PER_LOAD column tiles ---

struct ValueFragment {
  u32 raw[4];

  DEV void load(smem_t address, int l) {
    if (2 * l + 1 < KvLayout::CHUNKS)
      ldmatrix_x4_transposed(raw, KvLayout::at(address, l));
    else
      ldmatrix_x2_transposed(raw, KvLayout::at(address, l));
  }
  // o += the part of the load's column tile `tile`; p: weights of the 16 tokens.
  DEV void multiply(int tile, float (&o)[4], const u32 (&p)[4]) const {
#if KV_FP8
    const int chunk = tile / 2, odd = tile % 2;  // a tile of even columns, then one of odd ones
    mma(o, p, fp8_operand(raw[2 * chunk], odd, 2 + odd), fp8_operand(raw[2 * chunk + 1], odd, 2 + odd));
#else
    mma(o, p, raw[2 * tile], raw[2 * tile + 1]);
#endif
  }
  // The load's columns 16 * step and on (of 16 * K_STEPS_PER_LOAD) as the left operand, of O^T = V^T P^T.
  DEV void left_operand(int step, u32 (&a)[4]) const {
#if KV_FP8
    fp8_operands<true>(raw[2 * step], a[0], a[1]);
    fp8_operands<true>(raw[2 * step + 1], a[2], a[3]);
#else
    a[0] = raw[0], a[1] = raw[2], a[2] = raw[1], a[3] = raw[3];
#endif
  }
};

// O's accumulators hold pairs of neighbouring columns, N_TILES pairs for each of a lane's two rows.
DEV int output_column(int pair, int t) {
  return KV_FP8 ? 16 * (pair / 2) + 4 * t + 2 * (pair % 2) : 8 * pair + 2 * t;
}
template <int TILES> DEV void output_pair(const float (&o)[TILES][4], int pair, int upper, float& lo, float& hi) {
#if KV_FP8
  lo = o[pair & ~1][2 * upper + pair % 2];
  hi = o[pair | 1][2 * upper + pair % 2];
#else
  lo = o[pair][2 * upper];
  hi = o[pair][2 * upper + 1];
#endif
}

// Of O^T's accumulators for columns 16 * step and on: a lane's rows g and g + 8 into one head's O.
DEV void store_columns(float* o, int step, int g, float upper, float lower) {
#if KV_FP8
  struct alignas(8) Pair { float a, b; };
  *(Pair*)(o + 16 * step + 2 * g) = Pair{upper, lower};
#else
  o[16 * step + g] = upper;
  o[16 * step + 8 + g] = lower;
#endif
}

// --- scores ---
//
// A score is an exponent of two, x = s * SCORE_SCALE(scale) with s = cap_score(product). Without soft-cap
// scale = softmax scale * log2(e). With it (-DSOFTCAP=1) scale = 2 * log2(e) * softmax scale / cap, and
// cap = the soft-cap * log2(e). The scale of 8-bit keys is part of scale.

constexpr float HIDDEN = -1e30f;       // the s of a hidden token: its x stays far below NO_MAXIMUM
constexpr float NO_MAXIMUM = -1e20f;   // of a row that has seen no token; finite, so that no difference is NaN

#ifdef SOFTCAP
DEV float cap_score(float s, float scale, float cap) {  // cap * tanh(s * scale / (2 * log2(e)))
  return cap * (1.f - 2.f * reciprocal_fast(1.f + exp2_fast(s * scale)));
}
#define SCORE_SCALE(scale) 1.f
#else
DEV float cap_score(float s, float, float) { return s; }
#define SCORE_SCALE(scale) (scale)
#endif

// Online softmax: weights are 2^(x - m), where m follows the row's true maximum only when it is MAX_LAG
// behind. O is rarely rescaled so, and weights stay below 2^MAX_LAG. (An idea of FlashAttention 4.)
constexpr float MAX_LAG = 8.f;

// Raises m if `highest`, the row's highest new x, asks for it; returns what to multiply earlier sums by.
DEV float raise_maximum(float& m, float highest) {
  if (highest <= m + MAX_LAG) return 1.f;
  const float factor = exp2_fast(m - highest);
  m = highest;
  return factor;
}
