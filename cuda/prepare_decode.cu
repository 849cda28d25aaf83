// Inputs of a decode step, made on the device from row numbers: see engine/ops/prepare_decode.py.
//
// One thread block. First the block table takes in the blocks appended since the last step, then each
// thread prepares its rows; the barrier between orders a row's look-up after its own append.
#include "common/dependent_launch.cuh"
#include "common/dtype.cuh"

extern "C" __global__ void __launch_bounds__(1024) prepare_decode(
    const int* staged,       // [HEADER + 2 * max_batch + 3 * max_updates]
    int* __restrict__ block_table,        // [num_rows, table_stride]
    const long long* last_token,  // [num_rows]
    long long* __restrict__ input_ids,    // [batch]
    long long* __restrict__ positions,    // [batch]
    long long* __restrict__ slots,        // [batch]
    int* __restrict__ rows,               // [batch]
    int* __restrict__ seq_lens,           // [batch]
    int batch, int max_batch, int table_stride, int block_size)
{
  grid_dependency_wait();
  grid_dependency_launch();
  const int num_rows = staged[0], num_updates = staged[1];
  const int* staged_rows = staged + 4;
  const int* staged_computed = staged_rows + max_batch;
  const int* updates = staged_computed + max_batch;  // (row, index, block)
  for (int i = threadIdx.x; i < num_updates; i += blockDim.x)
    block_table[(long long)updates[3 * i] * table_stride + updates[3 * i + 1]] = updates[3 * i + 2];
  __syncthreads();
  for (int i = threadIdx.x; i < batch; i += blockDim.x) {
    const bool real = i < num_rows;
    const int row = real ? staged_rows[i] : 0;           // row 0: the dummy, all its blocks are block 0
    const int position = real ? staged_computed[i] : 0;
    const int block = block_table[(long long)row * table_stride + position / block_size];
    rows[i] = row;
    seq_lens[i] = position + 1;
    positions[i] = position;
    slots[i] = (long long)block * block_size + position % block_size;
    input_ids[i] = real ? last_token[row] : 0;
  }
}
