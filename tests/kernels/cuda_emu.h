// Just enough of CUDA C++ to run kernels on a CPU, for tests without a GPU.
//
//   g++ -DSLUICE_EMULATE -include cuda_emu.h kernel.cpp
//
// Thread blocks run one after another, or with -DCLUSTER=n n at a time, as their cluster waits for each
// other. Within a block every CUDA thread is a fiber (ucontext): it runs until it meets a barrier, a warp
// shuffle or its end, then the next one runs. So each run takes the same order, and data races do not show;
// what shows is wrong arithmetic, wrong indices and wrong geometry. -DEMU_SHUFFLED shows most races between warps:
// lanes of a warp meet at each emulated matrix product.
//
//   -DEMU_SHUFFLED=seed any warp runs next, and a copy takes place at once or as late as it may
//   -DEMU_BACKWARDS=1   the last block, and of a cluster's blocks the last thread, runs first
//   -DEMU_UNEVEN=seed   some of a cluster's blocks rest for a while, as chance would have it
//   -DEMU_LATE=1        what `emu::later` is given takes place, one at a time, only when all threads wait
//
//   fiber of thread 0    ──run──┐ __syncthreads            ┌──run── ...
//   fiber of thread 1           └──run──┐ __syncthreads    │
//   ...                                 └── last arrives ──┘
//
// A barrier or shuffle that some thread never reaches stops the program with a message. Static shared
// memory keeps its contents from block to block, dynamic shared memory is filled with NaN before each.
// Tensor cores and other blocks that wait for each other are not there.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

// --- the language ---

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#define EMU_VECTOR(T, name, align)                                                              \
  struct alignas(sizeof(T) * 2) name##2 { T x, y; };                                            \
  struct name##3 { T x, y, z; };                                                                \
  struct alignas(align) name##4 { T x, y, z, w; };                                              \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                    \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                            \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(int, int, 16)
EMU_VECTOR(unsigned, uint, 16)
EMU_VECTOR(float, float, 16)
EMU_VECTOR(unsigned short, ushort, 8)
EMU_VECTOR(unsigned char, uchar, 4)
EMU_VECTOR(long long, longlong, 16)
EMU_VECTOR(unsigned long long, ulonglong, 16)
EMU_VECTOR(double, double, 16)
struct dim3 { unsigned x = 1, y = 1, z = 1; };

// --- fibers ---

namespace emu {

constexpr size_t STACK_BYTES = 256 * 1024;

// Where threads wait for each other: a block, or the lanes of a warp that a mask names.
struct Meeting {
  unsigned arrived = 0;
  uint64_t round = 0;
  // Slow threads may still read the last round's results while fast ones are in the next, never further.
  int votes[3] = {0, 0, 0};     // of the last round, this one and, cleared, the next
  uint64_t values[2][32] = {};  // a shuffle's, of the last round and this one
};

struct Block;

// An asynchronous copy, which takes place when its thread waits for it, as late as it may.
struct Copy {
  void* to;
  const void* from;  // null: zeros
  size_t bytes;
  unsigned group;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Block* home;
  dim3 thread;
  unsigned linear = 0;
  bool done = false;
  std::vector<Copy> copies;  // that are under way
  unsigned copy_group = 0;   // number of the next group to be committed
};

struct Block {
  dim3 index;
  std::vector<Fiber> fibers;
  Meeting all;
  std::vector<std::map<unsigned, Meeting>> warps;  // by mask
  std::vector<uint64_t> dynamic_memory;
  unsigned alive = 0;

  char* memory() { return (char*)(((uintptr_t)dynamic_memory.data() + 1023) / 1024 * 1024); }
};

#ifdef CLUSTER
constexpr unsigned CLUSTER_BLOCKS = CLUSTER;
#else
constexpr unsigned CLUSTER_BLOCKS = 1;
#endif

inline dim3 grid, block;
inline Block cluster[8];  // those that run; all emulated kernels of a process have this array in common
inline Meeting whole_cluster;
inline Fiber* current = nullptr;
inline ucontext_t scheduler;
inline uint64_t progress = 0;  // changes when anything but waiting happened
inline void (*body)() = nullptr;

[[noreturn]] inline void fail(const char* what) {
  const dim3 index = current ? current->home->index : dim3{0, 0, 0};
  std::fprintf(stderr, "emulated kernel, block (%u, %u, %u), thread %u: %s\n", index.x, index.y, index.z,
               current ? current->linear : 0, what);
  std::abort();
}

inline std::deque<std::function<void()>> delayed;

// Work of an engine beside the threads: done at once, or as late as it may be.
inline void later(std::function<void()> work) {
#ifdef EMU_LATE
  delayed.push_back(std::move(work));
#else
  work();
#endif
}

inline void yield() { swapcontext(&current->context, &scheduler); }

// Wait until all `expected` threads of this round have come.
template <class Expected>
inline void meet(Meeting& m, Expected expected) {
  const uint64_t round = m.round;
  m.arrived++;
  progress++;
  while (m.round == round) {
    if (m.arrived >= expected()) {
      m.arrived = 0;
      m.round++;
      progress++;
    } else {
      yield();
    }
  }
}

inline unsigned lane() { return current->linear % 32; }

inline unsigned live_lanes(unsigned mask) {
  unsigned count = 0;
  const std::vector<Fiber>& fibers = current->home->fibers;
  const unsigned first = current->linear - lane();
  for (unsigned i = 0; i < 32; i++) {
    if ((mask >> i & 1) && first + i < fibers.size() && !fibers[first + i].done) count++;
  }
  return count;
}

inline Meeting& meeting_of(unsigned mask) {
  if (!(mask >> lane() & 1)) fail("a lane calls a warp function with a mask that leaves it out");
  return current->home->warps[current->linear / 32][mask];
}

inline void sync_warp(unsigned mask) {
  meet(meeting_of(mask), [mask] { return live_lanes(mask); });
}

// What lane `source` passes to the same call.
template <class T>
inline T exchange(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");
  Meeting& m = meeting_of(mask);
  uint64_t* values = m.values[m.round % 2];
  std::memcpy(&values[lane()], &value, sizeof(T));
  meet(m, [mask] { return live_lanes(mask); });
  T result;
  std::memcpy(&result, &values[source % 32], sizeof(T));
  return result;
}

inline int sync_threads(int vote) {
  Meeting& m = current->home->all;
  const uint64_t round = m.round;
  if (m.arrived == 0) m.votes[(round + 1) % 3] = 0;
  m.votes[round % 3] += vote != 0;
  meet(m, [] { return current->home->alive; });
  return m.votes[round % 3];
}

inline void sync_cluster() {
  meet(whole_cluster, [] {
    unsigned alive = 0;
    for (unsigned i = 0; i < CLUSTER_BLOCKS; i++) alive += cluster[i].alive;
    return alive;
  });
}

inline void enter() {
  body();
  current->done = true;
  current->home->alive--;
  progress++;
  swapcontext(&current->context, &scheduler);
}

inline void start_block(Block& b, dim3 index, size_t smem_bytes) {
  const unsigned count = block.x * block.y * block.z;
  if (b.fibers.size() != count) b.fibers = std::vector<Fiber>(count);
  b.index = index;
  b.all = Meeting();
  b.warps.assign((count + 31) / 32, {});
  b.dynamic_memory.assign((smem_bytes + 1024) / 8 + 1, ~uint64_t(0));
  b.alive = count;
  for (unsigned i = 0; i < count; i++) {
    Fiber& f = b.fibers[i];
    f.stack.resize(STACK_BYTES);
    f.home = &b;
    f.linear = i;
    f.thread = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
    f.done = false;
    f.copies.clear();
    f.copy_group = 0;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
}

inline void run_fiber(Fiber& f) {
  if (f.done) return;
  current = &f;
  swapcontext(&scheduler, &f.context);
}

#ifdef EMU_SHUFFLED
inline uint64_t shuffle_state;

inline unsigned drawn() {
  shuffle_state = shuffle_state * 6364136223846793005u + 1442695040888963407u;
  return shuffle_state >> 40;
}

// As many turns as there are warps, each of any warp, from any of its lanes on.
inline void run_some_warps(Block& b) {
  for (size_t turn = 0; turn < b.warps.size(); turn++) {
    const unsigned warp = drawn() % b.warps.size(), first = drawn();
    for (unsigned i = 0; i < 32; i++) {
      const size_t thread = 32 * warp + (first + i) % 32;
      if (thread < b.fibers.size()) run_fiber(b.fibers[thread]);
    }
  }
}
#endif

// A cluster's blocks, from `first` on along x.
inline void run_cluster(dim3 first, size_t smem_bytes) {
  whole_cluster = Meeting();
  for (unsigned i = 0; i < CLUSTER_BLOCKS; i++) start_block(cluster[i], {first.x + i, first.y, first.z}, smem_bytes);
  auto is_running = [] {
    for (unsigned i = 0; i < CLUSTER_BLOCKS; i++)
      if (cluster[i].alive > 0) return true;
    return false;
  };
  unsigned resting = 0;  // blocks, by bits
  while (is_running()) {
    const uint64_t before = progress;
    for (unsigned i = 0; i < CLUSTER_BLOCKS; i++) {
#ifdef EMU_BACKWARDS
      Block& b = cluster[CLUSTER_BLOCKS - 1 - i];
      for (size_t t = b.fibers.size(); t-- > 0;) run_fiber(b.fibers[t]);
#else
      if (resting >> i & 1) continue;
#ifdef EMU_SHUFFLED
      run_some_warps(cluster[i]);
      if (progress != before) continue;
#endif
      for (Fiber& f : cluster[i].fibers) run_fiber(f);
#endif
    }
#ifdef EMU_UNEVEN
    static uint64_t chance = EMU_UNEVEN;
    static unsigned rounds = 0;
    if (rounds-- == 0 || progress == before) {
      const bool is_stuck = resting == 0;
      chance = chance * 6364136223846793005u + 1442695040888963407u;
      rounds = chance >> 58;
      resting = progress == before ? 0 : chance >> 40;
      if (progress == before && !is_stuck) continue;
    }
#endif
    if (progress != before) continue;
    if (delayed.empty()) fail("threads wait at barriers or shuffles that others never reach");
    const std::function<void()> work = std::move(delayed.front());
    delayed.pop_front();
    work();
    progress++;
  }
}

inline void take_place(const Copy& c) {
  if (c.from) std::memcpy(c.to, c.from, c.bytes);
  else std::memset(c.to, 0, c.bytes);
}

inline void copy_later(void* to, const void* from, size_t bytes) {
#ifdef EMU_SHUFFLED
  if (drawn() % 2) return take_place({to, from, bytes, 0});
#endif
  current->copies.push_back({to, from, bytes, current->copy_group});
}
inline void commit_copies() { current->copy_group++; }

// Until at most `pending` of the thread's latest groups are under way.
inline void finish_copies(unsigned pending) {
  std::vector<Copy> rest;
  for (const Copy& c : current->copies) {
    if (c.group + pending >= current->copy_group) rest.push_back(c);
    else take_place(c);
  }
  current->copies.swap(rest);
}

inline void* dynamic_shared() { return current->home->memory(); }

// What lies in block `rank` of the cluster where `p` points to in this block's dynamic shared memory.
inline void* in_block_of_cluster(const void* p, int rank) {
  if (rank < 0 || rank >= (int)CLUSTER_BLOCKS) fail("the cluster has no such block");
  if (cluster[rank].alive == 0) fail("a block ended while another one still read its memory");
  return cluster[rank].memory() + ((const char*)p - current->home->memory());
}

// Run `kernel` over a grid. args[i] points to the i-th argument's value.
template <class... A>
void launch(void (*kernel)(A...), const unsigned* shape, size_t smem_bytes, void** args) {
  grid = {shape[0], shape[1], shape[2]};
  block = {shape[3], shape[4], shape[5]};
  static void (*target)(A...);
  static void** values;
  target = kernel;
  values = args;
  current = nullptr;
#ifdef EMU_SHUFFLED
  shuffle_state = EMU_SHUFFLED;
#endif
  if (grid.x % CLUSTER_BLOCKS != 0) fail("the grid is not a multiple of the cluster");
  body = [] {
    [&]<size_t... I>(std::index_sequence<I...>) {
      target(*(std::remove_const_t<std::remove_reference_t<A>>*)values[I]...);
    }(std::index_sequence_for<A...>());
  };
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x += CLUSTER_BLOCKS)
#ifdef EMU_BACKWARDS
        run_cluster({grid.x - CLUSTER_BLOCKS - x, y, z}, smem_bytes);
#else
        run_cluster({x, y, z}, smem_bytes);
#endif
}

}  // namespace emu

#define threadIdx (emu::current->thread)
#define blockIdx (emu::current->home->index)
#define blockDim (emu::block)
#define gridDim (emu::grid)
constexpr int warpSize = 32;

// --- barriers, shuffles, votes ---

inline void __syncthreads() { emu::sync_threads(0); }
inline int __syncthreads_count(int p) { return emu::sync_threads(p); }
inline int __syncthreads_or(int p) { return emu::sync_threads(p) != 0; }
inline int __syncthreads_and(int p) { return emu::sync_threads(!p) == 0; }
inline void __syncwarp(unsigned mask = ~0u) { emu::sync_warp(mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) {}
[[noreturn]] inline void __trap() { emu::fail("__trap()"); }

template <class T>
inline T __shfl_sync(unsigned mask, T x, int source, int width = 32) {
  return emu::exchange(mask, x, (emu::lane() & ~(width - 1)) + (source & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32) {
  const unsigned source = emu::lane() ^ bits;
  const bool inside = source / width <= emu::lane() / width;
  return emu::exchange(mask, x, inside ? source : emu::lane());
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T x, unsigned delta, int width = 32) {
  const bool inside = emu::lane() % width >= delta;
  return emu::exchange(mask, x, inside ? emu::lane() - delta : emu::lane());
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T x, unsigned delta, int width = 32) {
  const bool inside = emu::lane() % width + delta < (unsigned)width;
  return emu::exchange(mask, x, inside ? emu::lane() + delta : emu::lane());
}

namespace emu {
// f over the values of the live lanes in the mask.
template <class T, class F>
inline T reduce(unsigned mask, T x, F f) {
  Meeting& m = meeting_of(mask);
  uint64_t* values = m.values[m.round % 2];
  std::memcpy(&values[lane()], &x, sizeof(T));
  const std::vector<Fiber>& fibers = current->home->fibers;
  const unsigned first = current->linear - lane();
  unsigned taking_part = 0;  // as of the arrival; lanes may end once they have been let go
  for (unsigned i = 0; i < 32; i++) {
    if ((mask >> i & 1) && first + i < fibers.size() && !fibers[first + i].done) taking_part |= 1u << i;
  }
  meet(m, [mask] { return live_lanes(mask); });
  T result = x;
  for (unsigned i = 0; i < 32; i++) {
    if (i == lane() || !(taking_part >> i & 1)) continue;
    T other;
    std::memcpy(&other, &values[i], sizeof(T));
    result = f(result, other);
  }
  return result;
}
}  // namespace emu

inline unsigned __ballot_sync(unsigned mask, int p) {
  return emu::reduce(mask, p ? 1u << emu::lane() : 0u, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }
inline unsigned __activemask() { emu::fail("__activemask() says nothing certain: pass a mask"); }
template <class T>
inline T __reduce_add_sync(unsigned mask, T x) {
  return emu::reduce(mask, x, [](T a, T b) { return T(a + b); });
}
template <class T>
inline T __reduce_max_sync(unsigned mask, T x) {
  return emu::reduce(mask, x, [](T a, T b) { return a > b ? a : b; });
}
template <class T>
inline T __reduce_min_sync(unsigned mask, T x) {
  return emu::reduce(mask, x, [](T a, T b) { return a < b ? a : b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned x) {
  return emu::reduce(mask, x, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __match_any_sync(unsigned mask, unsigned x) {
  unsigned equal = 0;
  for (unsigned i = 0; i < 32; i++) {
    if ((mask >> i & 1) && __shfl_sync(mask, x, i) == x) equal |= 1u << i;
  }
  return equal;
}

// --- atomics: fibers do not interrupt each other ---

#define EMU_ATOMIC(name, expression)            \
  template <class T>                            \
  inline T name(T* p, std::type_identity_t<T> v) { \
    const T old = *p;                           \
    *p = expression;                            \
    return old;                                 \
  }
EMU_ATOMIC(atomicAdd, T(old + v))
EMU_ATOMIC(atomicSub, T(old - v))
EMU_ATOMIC(atomicMax, (old > v ? old : v))
EMU_ATOMIC(atomicMin, (old < v ? old : v))
EMU_ATOMIC(atomicExch, v)
EMU_ATOMIC(atomicOr, T(old | v))
EMU_ATOMIC(atomicAnd, T(old & v))
EMU_ATOMIC(atomicXor, T(old ^ v))
EMU_ATOMIC(atomicInc, (old >= v ? T(0) : T(old + 1)))
template <class T>
inline T atomicCAS(T* p, std::type_identity_t<T> compare, std::type_identity_t<T> v) {
  const T old = *p;
  if (old == compare) *p = v;
  return old;
}

// --- numbers ---

template <class To, class From>
inline To emu_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(To));
  return y;
}
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline double __longlong_as_double(long long x) { return emu_bits<double>(x); }
inline long long __double_as_longlong(double x) { return emu_bits<long long>(x); }

using std::max;
using std::min;
inline float rsqrtf(float x) { return (float)(1.0 / std::sqrt((double)x)); }
inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __saturatef(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; }
// Compile with -ffp-contract=off: these round after each operation.
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline unsigned __float2uint_rn(float x) { return (unsigned)nearbyintf(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
  return y;
}
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned long long)x * y >> 32; }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return (unsigned long long)((unsigned __int128)x * y >> 64);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  const unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= (unsigned)(bytes >> ((s >> (4 * i) & 7) * 8) & 0xff) << (8 * i);
  return r;
}
template <class T>
inline T __ldg(const T* p) { return *p; }
template <class T>
inline T __ldcg(const T* p) { return *p; }
template <class T>
inline T __ldcs(const T* p) { return *p; }
template <class T>
inline void __stcs(T* p, T v) { *p = v; }
template <class T>
inline void __stcg(T* p, T v) { *p = v; }
