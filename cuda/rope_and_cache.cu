// Per-head norm of q and k (optional), rotation by position, keys and values into the paged KV cache:
// one pass over the output of the qkv projection.
//
//   -DSCALAR_* -DBLOCK_SIZE=<tokens in a block of the cache> -DQK_NORM=0 | 1
//   and of rotation.cuh: -DHEAD_DIM -DROPE_FP32 -DKV_...
//
// Grid: (T, as many blocks as the heads of a token need). HEAD_LANES lanes have one head (rotation.cuh).
#include "common/dependent_launch.cuh"
#include "common/rotation.cuh"

extern "C" __global__ void __launch_bounds__(256, 4)
rope_and_cache(const scalar_t* qkv,  // [T, num_heads + 2 * num_kv_heads, HEAD_DIM]
               const angle_t* __restrict__ cos,   // [T, >= HALF], angle_stride elements from row to row
               const angle_t* __restrict__ sin,   // likewise
               const i64* __restrict__ slots,     // [T]
               const scalar_t* __restrict__ qk_norm,  // [num_heads + num_kv_heads, HEAD_DIM] if QK_NORM
               scalar_t* __restrict__ q_out,          // [T, num_heads, HEAD_DIM]
               kv_t* __restrict__ k_cache,  // [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
               kv_t* __restrict__ v_cache, i64 qkv_stride, i64 angle_stride, int num_heads,
               int num_kv_heads, float eps, float inverse_k_scale, float inverse_v_scale) {
  const i64 token = blockIdx.x;
  const int item = blockIdx.y * blockDim.x + threadIdx.x;
  const int head = item / HEAD_LANES, lane = item % HEAD_LANES, element = lane * 8;
  const int num_rotated = num_heads + num_kv_heads;
  // whole warps go on, for the sums over lanes
  const bool active = lane < BUSY_LANES && head < num_rotated + num_kv_heads;
  const bool is_rotated = active && head < num_rotated;

  // all loads first, so that their latencies overlap; only qkv comes from the kernel just before
  const i64 slot = slots[token];
  Angles angles;
  if (is_rotated) angles = load_angles(cos, sin, token * angle_stride + element);
  grid_dependency_wait();
  grid_dependency_launch();
  HeadPart x = {};
  if (active) x = load_head(qkv + token * qkv_stride + head * HEAD_DIM + element);
  if (QK_NORM) norm_head(x, is_rotated ? qk_norm + head * HEAD_DIM + element : nullptr, eps);
  if (!active) return;

  if (is_rotated) rotate(x, angles);
  if (head < num_heads) {
    scalar_t* p = q_out + (token * num_heads + head) * HEAD_DIM + element;
    store8(p, x.a);
    store8(p + HALF, x.b);
    return;
  }
  const i64 block = slot / BLOCK_SIZE, offset = slot % BLOCK_SIZE;
  const bool is_key = is_rotated;
  const int kv_head = head - (is_key ? num_heads : num_rotated);
  kv_t* p = (is_key ? k_cache : v_cache) +
            ((block * num_kv_heads + kv_head) * BLOCK_SIZE + offset) * HEAD_DIM + element;
  store_kv(p, x, is_key ? inverse_k_scale : inverse_v_scale);
}
