// Per-head norm of q and k (optional), rotation by position, keys and values into the paged KV cache:
// one pass over the output of the qkv projection.
//
//   -DSCALAR_* -DBLOCK_SIZE=<tokens in a block of the cache> -DQK_NORM=0 | 1
//   -DHEADS_PER_LANE=<of a token, one after another>
//   and of rotation.cuh: -DHEAD_DIM -DROPE_FP32 -DKV_...
//
// HEAD_LANES lanes have one head (rotation.cuh), so a warp has a few at once; it stays with its token for
// HEADS_PER_LANE rounds of them. All are loaded before the first is used, and angles serve all of them:
//
//   head of the token       0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 ...          for heads of 128: four at once
//   HEADS_PER_LANE = 3      <------ threadIdx.y = 0 ------>|<----- 1 ...
//
// Block: (32, warps of a token, tokens). Grid: (all tokens, as many blocks as the heads of a token need).
#include "common/dependent_launch.cuh"
#include "common/rotation.cuh"

constexpr int HEADS_AT_ONCE = 32 / HEAD_LANES;
constexpr int ROUND = HEADS_AT_ONCE * HEAD_DIM;  // elements that a warp has at once
constexpr int MAX_THREADS = 256;

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2)
rope_and_cache(const scalar_t* qkv,  // [T, num_heads + 2 * num_kv_heads, HEAD_DIM]
               // not __restrict__, so that they are read in front of the wait:
               const angle_t* cos,  // [T, >= HALF], angle_stride elements from row to row
               const angle_t* sin,  // likewise
               const i64* slots,    // [T]
               const scalar_t* __restrict__ qk_norm,  // [num_heads + num_kv_heads, HEAD_DIM] if QK_NORM
               scalar_t* __restrict__ q_out,          // [T, num_heads, HEAD_DIM]
               kv_t* __restrict__ k_cache,  // [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
               kv_t* __restrict__ v_cache, i64 qkv_stride, i64 angle_stride, int num_tokens,
               int num_heads, int num_kv_heads, float eps, float inverse_k_scale,
               float inverse_v_scale) {
  const i64 token = (i64)blockIdx.x * blockDim.z + threadIdx.z;
  if (token >= num_tokens) return;  // a whole warp
  const int warp = blockIdx.y * blockDim.y + threadIdx.y;  // of the token
  const int first_head = warp * (HEADS_PER_LANE * HEADS_AT_ONCE) + threadIdx.x / HEAD_LANES;
  const int lane = threadIdx.x % HEAD_LANES, element = lane * 8;
  const int num_rotated = num_heads + num_kv_heads;
  // lanes without elements go on, for the sums over lanes
  const int end = lane < BUSY_LANES ? num_rotated + num_kv_heads : 0;

  // all loads first, so that their latencies overlap; only qkv comes from the kernel just before
  const u64 slot = slots[token];
  Angles angles;
  if (lane < BUSY_LANES) angles = load_angles(cos, sin, token * angle_stride + element);
  grid_dependency_wait();
  grid_dependency_launch();
  StoredPart stored[HEADS_PER_LANE] = {};
  qkv += token * qkv_stride + first_head * HEAD_DIM + element;
#pragma unroll
  for (int i = 0; i < HEADS_PER_LANE; i++) {
    if (first_head + i * HEADS_AT_ONCE < end) stored[i] = load_stored(qkv + i * ROUND);
  }

  q_out += (token * num_heads + first_head) * HEAD_DIM + element;
#pragma unroll
  for (int i = 0; i < HEADS_PER_LANE; i++) {
    const int head = first_head + i * HEADS_AT_ONCE;
    const bool is_rotated = head < num_rotated && lane < BUSY_LANES;
    HeadPart x = unpack_head(stored[i]);
    if (QK_NORM) norm_head(x, is_rotated ? qk_norm + head * HEAD_DIM + element : nullptr, eps);
    if (head >= end) continue;
    if (is_rotated) rotate(x, angles);
    if (head < num_heads) {
      store8(q_out + i * ROUND, x.a);
      store8(q_out + i * ROUND + HALF, x.b);
      continue;
    }
    // the first use of the slot: any earlier, and loads of qkv would wait for it
    const u64 block = slot / BLOCK_SIZE, offset = slot % BLOCK_SIZE;
    const int kv_head = head - (is_rotated ? num_heads : num_rotated);
    kv_t* p = (is_rotated ? k_cache : v_cache) +
              ((block * num_kv_heads + kv_head) * BLOCK_SIZE + offset) * HEAD_DIM + element;
    store_kv(p, x, is_rotated ? inverse_k_scale : inverse_v_scale);
  }
}
