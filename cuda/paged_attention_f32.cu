// Causal attention in float32 over paged keys and values, for decode rows and prompt chunks alike: see
// engine/ops/paged_attention_f32.py for the contract. Meant for checking the other kernels' numbers, so it is
// as plain as can be: no tensor cores, no tiles, every product and sum in float32.
//
//   -DHEAD_DIM=<any>
//
// Grid: (tokens, query heads). The block's warps take the visible tokens in turn, each with an online softmax
// (https://arxiv.org/abs/1805.02867) of its own; lanes share the columns of a head. At the end they merge:
//
//   visible token   0  1  2  3  4  5  6  7 ...
//   warp            0  1  2  3  0  1  2  3 ...
#include "common/dtype.cuh"
#include "common/reduce.cuh"

constexpr int WARPS = 4;
constexpr int PER_LANE = (HEAD_DIM + 31) / 32;  // columns lane, lane + 32, ...
constexpr float NO_MAXIMUM = -1e30f;            // of no scores; finite, so that no difference is NaN

extern "C" __global__ void __launch_bounds__(WARPS * 32)
paged_attention_f32(float* __restrict__ out,            // [tokens, num_heads, HEAD_DIM]
                    const float* __restrict__ q,        // likewise, tokens q_stride numbers apart
                    const float* __restrict__ k_cache,  // [blocks, num_kv_heads, block_size, HEAD_DIM]
                    const float* __restrict__ v_cache,
                    const int* __restrict__ block_table,  // [table rows, table_stride]
                    const int* __restrict__ rows,         // [tokens] of the block table
                    const int* __restrict__ lens,         // [tokens] the token's position + 1
                    i64 q_stride, int table_stride, int num_kv_heads, int block_size, int window, float scale,
                    float softcap) {
  __shared__ float tops[WARPS], sums[WARPS], parts[WARPS][HEAD_DIM];
  const i64 token = blockIdx.x;
  const int head = blockIdx.y, num_heads = gridDim.y, kv_head = head / (num_heads / num_kv_heads);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int end = lens[token], begin = window > 0 ? max(0, end - window) : 0;
  const int* table_row = block_table + (i64)rows[token] * table_stride;

  float query[PER_LANE], o[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int column = lane + 32 * i;
    query[i] = column < HEAD_DIM ? q[token * q_stride + head * HEAD_DIM + column] * scale : 0.f;
    o[i] = 0.f;
  }
  float top = NO_MAXIMUM, sum = 0.f;  // the largest score so far, and the sum of e^(score - top)
  for (int key = begin + warp; key < end; key += WARPS) {
    const i64 block = table_row[key / block_size];
    const i64 first = ((block * num_kv_heads + kv_head) * block_size + key % block_size) * HEAD_DIM;
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      if (lane + 32 * i < HEAD_DIM) score += query[i] * k_cache[first + lane + 32 * i];
    }
    score = warp_sum(score);
    if (softcap > 0.f) score = softcap * tanhf(score / softcap);
    const float higher = fmaxf(top, score);
    const float keep = expf(top - higher), weight = expf(score - higher);
    top = higher;
    sum = sum * keep + weight;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      if (lane + 32 * i < HEAD_DIM) o[i] = o[i] * keep + weight * v_cache[first + lane + 32 * i];
    }
  }

  if (lane == 0) {
    tops[warp] = top;
    sums[warp] = sum;
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    if (lane + 32 * i < HEAD_DIM) parts[warp][lane + 32 * i] = o[i];
  }
  __syncthreads();
  float highest = tops[0], total = 0.f, weights[WARPS];
#pragma unroll
  for (int w = 1; w < WARPS; w++) highest = fmaxf(highest, tops[w]);
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    weights[w] = expf(tops[w] - highest);
    total += weights[w] * sums[w];
  }
  for (int column = threadIdx.x; column < HEAD_DIM; column += WARPS * 32) {
    float value = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) value += weights[w] * parts[w][column];
    // a token that sees nothing gets zeros; NaN is passed on
    out[(token * num_heads + head) * HEAD_DIM + column] = total == 0.f ? 0.f : value / total;
  }
}
