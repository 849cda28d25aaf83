// Programmatic dependent launch: a kernel's blocks may start while the kernel before it in the stream still
// runs. (CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization"; Hopper and later.)
//
//   reads of weights and of what kernels wrote that are at least two launches back
//   grid_dependency_wait();      the kernel before this one has ended, and its writes are visible
//   grid_dependency_launch();    the kernel after this one may start, once every block has come here
//   everything else
//
// What is read behind the wait must not be a `const ... __restrict__` parameter: that promises that nobody
// writes it while the kernel runs, and the compiler would move the reads in front of the wait. It also moves
// such reads from before the wait to behind it, which costs time and no more: without __restrict__ they stay.
//
// Every kernel that is launched so must wait, and must not let the next one start before it has waited:
// then a kernel that has started knows all but its predecessor to have ended. Without the launch attribute,
// and before Hopper, these do nothing.
#pragma once
#include "common/dtype.cuh"

#ifdef SLUICE_EMULATE
DEV void grid_dependency_wait() {}
DEV void grid_dependency_launch() {}
#else
DEV void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif
