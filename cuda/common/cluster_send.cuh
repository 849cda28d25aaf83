// Stores into the shared memory of a cluster's blocks, which are counted by an mbarrier there. (st.async, PTX
// ISA 8.1; Hopper.)
//
// The receiver expects so many bytes at its mbarrier and waits for them. That takes neither a barrier of the
// cluster nor a fence: both would wait for the memory.
#pragma once
#include "common/sm90.cuh"

// v to the place of block `rank` that lies at `to` in this one; 16 of the bytes that the mbarrier waits for that
// lies there at `barrier`. The block may be this one. It must have started, and not end before it has waited.
DEV void send_float4(u32 to, float4 v, u32 barrier, int rank) {
#ifdef SLUICE_EMULATE
  float4* place = (float4*)emu::in_block_of_cluster(shared_pointer(to), rank);
  EmulatedMbarrier* counter = &emulated_mbarrier_at(barrier, rank);
  emu::later([=] {
    *place = v;
    counter->bytes -= 16;
    counter->settle();
  });
#else
  asm volatile("{\n.reg .b32 place, counter;\nmapa.shared::cluster.u32 place, %0, %6;\nmapa.shared::cluster.u32 counter, %5, %6;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [place], {%1, %2, %3, %4}, [counter];\n}"
               :: "r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier), "r"(rank) : "memory");
#endif
}
