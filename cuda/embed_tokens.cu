// What a forward pass starts with: each token's row of the embedding table, and the row of the table of
// angles for its position. One block for each token.
#include "common/dependent_launch.cuh"
#include "common/dtype.cuh"

constexpr int THREADS = 128;

// [rows, num_words] 16-byte words; `from` of a table, `to` of what is returned.
DEV void copy_row(uint4* to, const uint4* from, i64 row, i64 token, int num_words) {
  for (int i = threadIdx.x; i < num_words; i += THREADS) to[token * num_words + i] = from[row * num_words + i];
}

extern "C" __global__ void __launch_bounds__(THREADS) embed_tokens(
    uint4* __restrict__ hidden,        // [T, hidden_words]
    uint4* __restrict__ angles,        // [T, angle_words]
    const uint4* table,                // [vocab_size, hidden_words]
    const uint4* angle_table,          // [positions, angle_words]
    const i64* token_ids,              // [T]
    const i64* positions,              // [T]
    int hidden_words, int angle_words)
{
  grid_dependency_wait();
  grid_dependency_launch();
  const i64 token = blockIdx.x;
  copy_row(hidden, table, token_ids[token], token, hidden_words);
  copy_row(angles, angle_table, positions[token], token, angle_words);
}
