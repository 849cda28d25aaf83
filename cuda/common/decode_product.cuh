// A block's share of y = x W^T for up to 8 rows of x, W coming through the ring (weight_ring.cuh), with what surrounds
// it in a decoder (engine/ops/fused_product.py). The products and the order of their sums are skinny_gemm.cu's,
// so that both give the same bits:
//
//   W rows as M (16), x rows as N (8): mma m16n8k16. Warp w takes the chunks of 64 columns w, w + 8, ... of K; the
//   halves of a chunk are summed apart. The warps' sums meet in shared memory, added in order of the warps.
//
// The x of a warp's chunks, the same for all tiles, stays in registers.
//
//   -DLEAST_BLOCKS=n   a grid has so many blocks or more
#pragma once
#include "common/gate.cuh"
#include "common/grid_barrier.cuh"
#include "common/kv_tile.cuh"
#include "common/vec.cuh"
#include "common/weight_ring.cuh"

constexpr int MAX_ROWS = 8;
constexpr int THREADS = 32 * WARPS;  // that multiply

constexpr int most_outputs(int outputs) { return (outputs + LEAST_BLOCKS - 1) / LEAST_BLOCKS; }
constexpr int most_tiles(int outputs, bool gated) {
  return (most_outputs(outputs) + (gated ? 8 : 16) - 1) / (gated ? 8 : 16);
}
// Floats between the sums of neighbouring rows of x: 4 times an odd number, no bank conflicts either way.
constexpr int sum_stride(int outputs, bool gated) { return 16 * most_tiles(outputs, gated) + 4; }
constexpr int sum_floats(int outputs, bool gated) {
  return WARPS * MAX_ROWS * (sum_stride(outputs, gated) + 1);  // and the squares
}

// Of x, if the kernel has changed it, and of what is added to a block's own outputs.
struct ProductOperands {
  const scalar_t* x;         // [m, K]
  const scalar_t* bias;      // [rows of W], or null
  const scalar_t* residual;  // [m, outputs], or null
  scalar_t* out;             // [m, outputs]
  int m;
  float eps;                 // NORMED
};

template <int OUTPUTS, int K, bool GATED, bool NORMED> struct BlockProduct {
  static constexpr int CHUNKS = K / CHUNK, X_CHUNKS = (CHUNKS + WARPS - 1) / WARPS;
  static constexpr int PIECES = (CHUNKS + PIECE_CHUNKS - 1) / PIECE_CHUNKS;
  static constexpr int FACTORS = GATED ? 2 : 1;  // rows of W to an output
  static constexpr int SUM_STRIDE = sum_stride(OUTPUTS, GATED);
  static constexpr int PER_THREAD = (MAX_ROWS * most_outputs(OUTPUTS) + THREADS - 1) / THREADS;  // outputs
  static_assert(K % CHUNK == 0, "whole chunks");

  typedef uint4 Inputs[X_CHUNKS][2];  // of row g, the 8 columns from 8 t on of each half

  static DEV void load_inputs(Inputs& x, const ProductOperands& op, int warp, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < X_CHUNKS; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int chunk = warp + WARPS * i;
        x[i][half] = make_uint4(0, 0, 0, 0);
        if (g < op.m && chunk < CHUNKS) x[i][half] = load16_l2(op.x + g * K + chunk * CHUNK + half * 32 + t * 8);
      }
  }

  // The sum of squares of row g of x, in c[0] or c[1] of the lane with t = g / 2: on the diagonal of x x^T.
  static DEV void store_squares(float* squares, const Inputs& x, int lane) {
    const int g = lane >> 2, t = lane & 3;
    float c[2][4] = {};
#pragma unroll
    for (int i = 0; i < X_CHUNKS; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint4 b = x[i][half];
        const u32 first[4] = {b.x, 0, b.y, 0}, last[4] = {b.z, 0, b.w, 0};
        mma(c[half], first, b.x, b.y);
        mma(c[half], last, b.z, b.w);
      }
    if (t == g / 2) squares[g] = g % 2 ? c[0][1] + c[1][1] : c[0][0] + c[1][0];
  }

  // One tile: waits for its flights, and gives their slots back.
  static DEV void multiply(float (&sums)[2][4], const Inputs& x, const WeightRing& ring, const u8* slots,
                           RingPosition& at, const TileRows<GATED>& tile, int warp, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const u8 *upper, *lower;
    // What lies in a row that is missing goes into results that nobody reads.
    auto open = [&] {
      mbarrier_wait(ring.full_of(at.flight), at.parity());
      upper = slots + RingPosition::wrapped(at.slot + min(g, tile.low - 1)) * PITCH + t * 16;
      lower = tile.high == 0 ? upper
                             : slots + RingPosition::wrapped(at.slot + tile.low + min(g, tile.high - 1)) * PITCH + t * 16;
    };
    auto close = [&] {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(ring.empty_of(at.flight));
      at.advance(tile.low + tile.high);
    };
    int piece = 0;
    open();
#pragma unroll
    for (int i = 0; i < X_CHUNKS; i++) {
      const int chunk = warp + WARPS * i, last_of_any = min(WARPS * i + WARPS, CHUNKS) - 1;
      if (chunk < CHUNKS) {
        if (i > 0 && WARPS * (i - 1) / PIECE_CHUNKS != last_of_any / PIECE_CHUNKS && chunk >= (piece + 1) * PIECE_CHUNKS) {
          close();
          piece++;
          open();
        }
        const int offset = (chunk - piece * PIECE_CHUNKS) * (CHUNK * 2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint4 a = load16(upper + offset + half * 64), b = load16(lower + offset + half * 64);
          const u32 first[4] = {a.x, b.x, a.y, b.y}, last[4] = {a.z, b.z, a.w, b.w};
          mma(sums[half], first, x[i][half].x, x[i][half].y);
          mma(sums[half], last, x[i][half].z, x[i][half].w);
        }
      }
    }
    close();
    for (piece++; piece < PIECES; piece++) {  // in which this warp has no chunk
      open();
      close();
    }
  }

  // `area`: sum_floats(OUTPUTS, GATED) floats in shared memory, which nobody reads any more behind the barrier's
  // last arrival.
  static DEV void run(const ProductOperands& op, Slice slice, const WeightRing& ring, const u8* slots,
                      RingPosition& at, GridBarrier& grid, float* area) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int num_outputs = op.m * slice.count;
    // What is added to this thread's outputs, which nobody else changes: not looked at before it is needed.
    scalar_t bias[PER_THREAD][FACTORS] = {}, residual[PER_THREAD] = {};
#pragma unroll
    for (int p = 0; p < PER_THREAD; p++) {
      const int e = threadIdx.x + THREADS * p;
      if (e >= num_outputs) break;
      const int row = e / slice.count, output = slice.first + e - row * slice.count;
      const int row_of_w = GATED ? output / 8 * 16 + output % 8 : output;
#pragma unroll
      for (int f = 0; f < FACTORS; f++)
        if (op.bias != nullptr) bias[p][f] = op.bias[row_of_w + 8 * f];
      if (op.residual != nullptr) residual[p] = load2_l2(op.residual + row * OUTPUTS + output);
    }
    grid.wait();
    Inputs x;
    load_inputs(x, op, warp, lane);
    float* squares = area + WARPS * MAX_ROWS * SUM_STRIDE;  // [WARPS][MAX_ROWS]
    if (NORMED) store_squares(squares + warp * MAX_ROWS, x, lane);
    for (int done = 0; done < slice.count; done += TileRows<GATED>::OUTPUTS) {
      const TileRows<GATED> tile(slice.count - done);
      float sums[2][4] = {};
      multiply(sums, x, ring, slots, at, tile, warp, lane);
      float* to = area + (warp * MAX_ROWS + 2 * t) * SUM_STRIDE + done * FACTORS + g;
      if (2 * t < op.m) to[0] = sums[0][0] + sums[1][0], to[8] = sums[0][2] + sums[1][2];
      to += SUM_STRIDE;
      if (2 * t + 1 < op.m) to[0] = sums[0][1] + sums[1][1], to[8] = sums[0][3] + sums[1][3];
    }
    grid.stamp();
    sync_part();
    grid.stamp();
#pragma unroll
    for (int p = 0; p < PER_THREAD; p++) {
      const int e = threadIdx.x + THREADS * p;
      if (e >= num_outputs) break;
      const int row = e / slice.count, i = e - row * slice.count;
      auto over_warps = [&](const float* sums, int stride) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w * stride];
        return sum;
      };
      const float factor = NORMED ? rsqrtf(over_warps(squares + row, MAX_ROWS) * reciprocal_fast((float)K) + op.eps) : 1.f;
      const float* sums = area + row * SUM_STRIDE + (GATED ? i / 8 * 16 + i % 8 : i);
      float y[FACTORS];
#pragma unroll
      for (int f = 0; f < FACTORS; f++)
        y[f] = over_warps(sums + 8 * f, MAX_ROWS * SUM_STRIDE) * factor + to_float(bias[p][f]);
      if (GATED) y[0] = silu(y[0]) * y[FACTORS - 1];
      op.out[row * OUTPUTS + slice.first + i] = from_float(y[0] + to_float(residual[p]));
    }
    grid.arrive();
  }
};
