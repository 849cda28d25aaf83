// What a row of the batch asks for, and its logits as the stages before the draw leave them.
//
//   -DSCALAR_* type of the logits   -DSAMPLING_CLASS=<0: greedy, 1: draws, 2: edits and draws>
//
// Logits are never written: whoever needs an edited logit computes it again from its tables.
#pragma once
#include "common/dtype.cuh"
#include "common/philox.cuh"
#include "common/select.cuh"
#include "common/vec.cuh"

constexpr bool CAN_DRAW = SAMPLING_CLASS >= 1, CAN_EDIT = SAMPLING_CLASS >= 2;

constexpr int OCTET = 8;    // tokens at a time: those of one Philox block with coarse bits
constexpr int GROUP = 64;   // tokens whose largest logit is noted
constexpr int SLICE_THREADS = 256, OCTETS_PER_THREAD = 2;
constexpr int ROW_THREADS = 512;  // that finish a row
constexpr int SLICE = SLICE_THREADS * OCTETS_PER_THREAD * OCTET;  // tokens of one block

// Bits of RowParams::flags; engine/ops/sample_cuda.py has the same.
constexpr u32 DRAW = 1, PENALTIES = 2, LOGIT_BIAS = 4, MIN_TOKENS = 8;
constexpr u32 TRUNCATE = 32;  // min_p, top_k or top_p
constexpr u32 MASS = 64;      // top_p without top_k and min_p: the mass of all tokens is needed

// Bits of a token in RowParams::tokens; below them, how often the token is in the output, at most COUNT.
constexpr u32 IN_PROMPT = 1u << 15, STOPS = 1u << 14, COUNT = STOPS - 1;

struct Bias {
  int id;
  float value;
};

struct RowParams {
  u64 seed;
  u16* tokens;         // [V padded to 8] if PENALTIES or MIN_TOKENS
  const Bias* biases;  // [num_biases] by id, each once, if LOGIT_BIAS
  double top_p;
  int min_length;     // MIN_TOKENS: position from which stop tokens are allowed
  u32 flags;
  float temperature;
  float log_min_p;    // -infinity: off
  int top_k;          // 0: off
  float repetition, frequency, presence;
  int num_logprobs;   // -1: off
  int num_biases;
};
static_assert(sizeof(RowParams) == 72, "engine/ops/sample_cuda.py lays it out");

DEV float infinity() { return __int_as_float(0x7f800000); }

// Eight floats from an address that is a multiple of 16 bytes.
DEV void load_octet(const float* p, float (&x)[OCTET]) {
  const uint4 a = load16(p), b = load16(p + 4);
  x[0] = __uint_as_float(a.x), x[1] = __uint_as_float(a.y);
  x[2] = __uint_as_float(a.z), x[3] = __uint_as_float(a.w);
  x[4] = __uint_as_float(b.x), x[5] = __uint_as_float(b.y);
  x[6] = __uint_as_float(b.z), x[7] = __uint_as_float(b.w);
}
DEV void load_octet(const u16* p, float (&x)[OCTET]) {
#if !defined(SCALAR_FP32)
  unpack16(load16(p), x);
#endif
}

// Logits first, first + 1, ... of a row; -infinity beyond the vocabulary.
DEV void raw_octet(const scalar_t* logits, int first, int vocab_size, bool is_aligned,
                   float (&x)[OCTET]) {
  if (is_aligned && first + OCTET <= vocab_size) {
    load_octet(logits + first, x);
    return;
  }
#pragma unroll
  for (int e = 0; e < OCTET; e++) {
    x[e] = first + e < vocab_size ? to_float(logits[first + e]) : -infinity();
  }
}

// x[i] for an i that only the running kernel knows, without a trip through memory.
DEV float element(const float (&x)[OCTET], int i) {
  float value = x[0];
#pragma unroll
  for (int e = 1; e < OCTET; e++) value = e == i ? x[e] : value;
  return value;
}

// One row of the batch, with what its stages need.
struct Row {
  const RowParams* params;
  const scalar_t* logits;
  const u8* mask;  // [V / 8 rounded up] a bit for each token: 1, allowed; null: all are
  int position;    // of the new token
  int vocab_size;
  bool is_aligned;  // logits + 8 i is a multiple of 16 bytes
  u32 flags;
  float temperature;

  DEV bool has_edits() const {
    return CAN_EDIT && (mask != nullptr || (flags & (LOGIT_BIAS | MIN_TOKENS | PENALTIES)));
  }

  DEV void edit(int first, float (&x)[OCTET]) const {
    if (!CAN_EDIT) return;
    if (first >= vocab_size) return;  // the tables end there
    if (mask != nullptr) {
      const u32 allowed = mask[first / OCTET];
#pragma unroll
      for (int e = 0; e < OCTET; e++) {
        if (!(allowed >> e & 1)) x[e] = -infinity();
      }
    }
    const bool may_not_stop = (flags & MIN_TOKENS) && position < params->min_length;
    const bool needs_tokens = may_not_stop || (flags & PENALTIES);
    if (flags & LOGIT_BIAS) add_biases(first, x);
    if (needs_tokens) edit_by_tokens(load16(params->tokens + first), may_not_stop, x);
  }

  // The list is short and stays in L1: finding an octet's few costs less than reading V values would.
  DEV void add_biases(int first, float (&x)[OCTET]) const {
    const int end = params->num_biases;
    int at = 0, high = end;
    while (at < high) {
      const int middle = (at + high) / 2;
      if (params->biases[middle].id < first) at = middle + 1;
      else high = middle;
    }
    for (; at < end; at++) {
      const Bias bias = params->biases[at];
      if (bias.id >= first + OCTET) break;
#pragma unroll
      for (int e = 0; e < OCTET; e++) {
        if (bias.id == first + e) x[e] = __fadd_rn(x[e], bias.value);
      }
    }
  }

  DEV void edit_by_tokens(const uint4& entries, bool may_not_stop, float (&x)[OCTET]) const {
    const u32 pairs[OCTET / 2] = {entries.x, entries.y, entries.z, entries.w};
    const u32 concerned = (may_not_stop ? STOPS : 0) | (flags & PENALTIES ? IN_PROMPT | COUNT : 0);
    const u32 any = pairs[0] | pairs[1] | pairs[2] | pairs[3];
    if (!(any & (concerned << 16 | concerned))) return;  // most octets
#pragma unroll
    for (int e = 0; e < OCTET; e++) {
      const u32 token = pairs[e / 2] >> (e % 2 * 16);
      if (may_not_stop && (token & STOPS)) x[e] = -infinity();
      if (!(flags & PENALTIES) || !(token & (IN_PROMPT | COUNT))) continue;
      // single roundings, as in engine/ops/penalties.py: no fused multiply-add
      const u32 count = token & COUNT;
      const float repetition = params->repetition;
      x[e] = x[e] > 0 ? __fdiv_rn(x[e], repetition) : __fmul_rn(x[e], repetition);
      x[e] = __fsub_rn(x[e], __fmul_rn((float)count, params->frequency));
      if (count > 0) x[e] = __fsub_rn(x[e], params->presence);
    }
  }

  // Logits before temperature.
  DEV void edited_octet(int first, float (&x)[OCTET]) const {
    raw_octet(logits, first, vocab_size, is_aligned, x);
    edit(first, x);
  }

  DEV float tempered(float x) const { return __fdiv_rn(x, temperature); }

  // --- Scores in the draw ---

  // Exactly, of an edited logit.
  DEV Score score_of(float logit, u32 id) const {
    return {(double)tempered(logit) + token_noise(params->seed, position, id), id};
  }
  DEV float score_scale() const { return __fdiv_rn(LOG2_E, temperature); }

  DEV void tempered_octet(int first, float (&x)[OCTET]) const {
    edited_octet(first, x);
#pragma unroll
    for (int e = 0; e < OCTET; e++) x[e] = tempered(x[e]);
  }
};

// A row of masks consists of words of 32 bits.
DEV i64 mask_bytes(int vocab_size) { return (vocab_size + 31) / 32 * 4; }

// Row `index` of the batch, whose row number is `number`.
DEV Row row_of(int index, int number, const scalar_t* logits, i64 stride, const u8* masks,
               const int* positions, const RowParams* params, int vocab_size, bool is_aligned) {
  Row row = {};
  row.logits = logits + index * stride;
  row.vocab_size = vocab_size;
  row.is_aligned = is_aligned;
  if (CAN_DRAW) {
    row.params = params + number;
    row.flags = row.params->flags;
    row.temperature = row.params->temperature;
    row.position = positions[index];
  }
  if (CAN_EDIT && masks != nullptr) row.mask = masks + index * mask_bytes(vocab_size);
  return row;
}
