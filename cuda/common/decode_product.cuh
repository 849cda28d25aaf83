// A block's share of y = x W^T for up to 8 rows of x, W coming through the ring (weight_ring.cuh), with what surrounds
// it in a decoder (engine/ops/fused_product.py), as in skinny_gemm.cu:
//
//   W rows as M (16), x rows as N (8): mma m16n8k16. Warp w takes the chunks of 64 columns w, w + 8, ... of K; the
//   quarters of a chunk are summed apart, so that products wait less for each other. The warps' sums meet in
//   shared memory, added in order of the warps.
//
// The x of a warp's chunks, the same for all tiles, stays in registers. How it gets there is the caller's affair.
//
//   -DLEAST_BLOCKS=n   a grid has so many blocks or more
#pragma once
#include "common/gate.cuh"
#include "common/kv_tile.cuh"
#include "common/lamport.cuh"
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

// What surrounds a product, and where its results go.
struct ProductOperands {
  const scalar_t* bias;  // [rows of W], or null
  scalar_t* out;         // [m, outputs], empty
  int m;
  float eps;             // NORMED
};

constexpr int smaller(int a, int b) { return a < b ? a : b; }

template <int OUTPUTS, int K, bool GATED, bool NORMED, bool RESIDUAL> struct BlockProduct {
  static constexpr int CHUNKS = K / CHUNK, X_CHUNKS = (CHUNKS + WARPS - 1) / WARPS;
  static constexpr int FACTORS = GATED ? 2 : 1;  // rows of W to an output
  static constexpr int SUM_STRIDE = sum_stride(OUTPUTS, GATED);
  static constexpr int PER_THREAD = (MAX_ROWS * most_outputs(OUTPUTS) + THREADS - 1) / THREADS;  // outputs
  // Flights that a tile consists of; so many are waited for at once, if the ring holds them, and attention at head size 128
  // leaves registers.
  static constexpr int PIECES = (CHUNKS + PIECE_CHUNKS - 1) / PIECE_CHUNKS;
  static constexpr int TILE_ROWS = GATED ? 16 : smaller(16, most_outputs(OUTPUTS));
  static constexpr int AT_ONCE = smaller(HEAD_DIM > 64 ? smaller(2, PIECES) : PIECES, smaller(FLIGHTS, SLOTS / TILE_ROWS));
  static_assert(K % CHUNK == 0, "whole chunks");

  typedef uint4 Inputs[X_CHUNKS][2];  // of row g, the 8 columns from 8 t on of each half
  typedef scalar_t Own[PER_THREAD];   // what a thread's outputs are added to

  // A thread's outputs, the same in every layer: f(number, row, output of the slice).
  template <class F> static DEV void each_output(int m, Slice slice, F f) {
#pragma unroll
    for (int p = 0; p < PER_THREAD; p++) {
      const int e = threadIdx.x + THREADS * p;
      if (e >= m * slice.count) break;
      const int row = e / slice.count;
      f(p, row, e - row * slice.count);
    }
  }

  // x [m, K], which other blocks fill while we look, unless `is_there`. A long wait looks at little.
  static DEV void load_inputs(Inputs& x, const scalar_t* from, int m, bool is_there, bool is_long) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    static_assert(2 * X_CHUNKS <= 32, "a bit for each load");
    u32 missing = 0;
#pragma unroll
    for (int i = 0; i < X_CHUNKS; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        x[i][half] = make_uint4(0, 0, 0, 0);
        if (g < m && warp + WARPS * i < CHUNKS) missing |= 1u << (2 * i + half);
      }
    const scalar_t* mine = from + g * K + warp * CHUNK + t * 8;
    Patience patience;
    if (is_long && missing != 0)
      while (has_gap(load16_l2(mine))) patience.look_again();
    while (missing != 0) {
#pragma unroll
      for (int i = 0; i < 2 * X_CHUNKS; i++)
        if (missing >> i & 1) x[i / 2][i % 2] = load16_l2(mine + i / 2 * (WARPS * CHUNK) + i % 2 * 32);
      if (is_there) break;
#pragma unroll
      for (int i = 0; i < 2 * X_CHUNKS; i++)
        if (!has_gap(x[i / 2][i % 2])) missing &= ~(1u << i);
      if (missing != 0) patience.look_again();
    }
    __syncwarp();
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
  static DEV void multiply(float (&sums)[4][4], const Inputs& x, const WeightRing& ring, const u8* slots,
                           RingPosition& at, const TileRows<GATED>& tile, int warp, int lane) {
    const int g = lane >> 2, t = lane & 3, rows = tile.low + tile.high;
    const u8* mine = slots + t * 16;
    // What lies in a row that is missing goes into results that nobody reads.
    const int upper_row = min(g, tile.low - 1), lower_row = tile.low + min(g, tile.high - 1);
#pragma unroll
    for (int first = 0; first < PIECES; first += AT_ONCE) {
      const int count = smaller(AT_ONCE, PIECES - first);
#pragma unroll
      for (int p = 0; p < count; p++) mbarrier_wait(ring.full_of(at.flight + p), (at.flight + p) / FLIGHTS & 1);
#pragma unroll
      for (int i = 0; i < X_CHUNKS; i++) {
        const int begin = first * PIECE_CHUNKS, end = smaller(begin + count * PIECE_CHUNKS, CHUNKS);
        if (WARPS * i >= end || WARPS * i + WARPS <= begin) continue;
        // Behind the last chunk x is zero, and any W will do. No branch, where none is needed, keeps loads together.
        const int chunk = min(warp + WARPS * i, CHUNKS - 1);
        const bool is_whole = WARPS * i >= begin && (WARPS * i + WARPS <= end || end == CHUNKS);
        if (!is_whole && (chunk < begin || chunk >= end)) continue;
        const int border = WARPS * i / PIECE_CHUNKS + 1, piece = border - (chunk < border * PIECE_CHUNKS);
        const int slot = at.slot + (piece - first) * rows, offset = (chunk - piece * PIECE_CHUNKS) * (CHUNK * 2);
        const u8* upper = mine + RingPosition::wrapped(slot + upper_row) * PITCH + offset;
        const u8* lower = mine + RingPosition::wrapped(slot + lower_row) * PITCH + offset;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint4 a = load16(upper + half * 64), b = TILE_ROWS > 8 && tile.high > 0 ? load16(lower + half * 64) : a;
          const u32 former[4] = {a.x, b.x, a.y, b.y}, latter[4] = {a.z, b.z, a.w, b.w};
          mma(sums[2 * half], former, x[i][half].x, x[i][half].y);
          mma(sums[2 * half + 1], latter, x[i][half].z, x[i][half].w);
        }
      }
      __syncwarp();
      if (lane < count) mbarrier_arrive(ring.empty_of(at.flight + lane));
      at.advance(count * rows, count);
    }
  }

  // `load`: fills a warp's part of Inputs. `area`: sum_floats(OUTPUTS, GATED) floats in shared memory, which
  // nobody uses, and will not when this returns.
  template <class Load>
  static DEV void run(const ProductOperands& op, Slice slice, Load load, scalar_t* own, const WeightRing& ring,
                      const u8* slots, RingPosition& at, Stopwatch& watch, float* area) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    scalar_t bias[PER_THREAD][FACTORS] = {};  // not looked at before it is needed
    if (op.bias != nullptr)
      each_output(op.m, slice, [&](int p, int, int i) {
        const int output = slice.first + i;
#pragma unroll
        for (int f = 0; f < FACTORS; f++) bias[p][f] = op.bias[(GATED ? output / 8 * 16 + output % 8 : output) + 8 * f];
      });
    watch.stamp();
    Inputs x;
    load(x);
    named_barrier_arrive(READ_BARRIER, WITH_CLEANER);
    watch.stamp();
    float* squares = area + WARPS * MAX_ROWS * SUM_STRIDE;  // [WARPS][MAX_ROWS]
    if (NORMED) store_squares(squares + warp * MAX_ROWS, x, lane);
    for (int done = 0; done < slice.count; done += TileRows<GATED>::OUTPUTS) {
      const TileRows<GATED> tile(slice.count - done);
      float sums[4][4] = {};
      multiply(sums, x, ring, slots, at, tile, warp, lane);
      auto sum = [&](int e) { return (sums[0][e] + sums[1][e]) + (sums[2][e] + sums[3][e]); };
      float* to = area + (warp * MAX_ROWS + 2 * t) * SUM_STRIDE + done * FACTORS + g;
      if (2 * t < op.m) to[0] = sum(0), to[8] = sum(2);
      to += SUM_STRIDE;
      if (2 * t + 1 < op.m) to[0] = sum(1), to[8] = sum(3);
    }
    watch.stamp();
    named_barrier_sync(SUMS_BARRIER, WITH_CLEANER);
    watch.stamp();
    each_output(op.m, slice, [&](int p, int row, int i) {
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
      const scalar_t result = from_float(RESIDUAL ? y[0] + to_float(own[p]) : y[0]);
      if (RESIDUAL) own[p] = result;
      store2_l2(op.out + row * OUTPUTS + slice.first + i, result);
    });
    watch.stamp();
    sync_part();
  }
};
