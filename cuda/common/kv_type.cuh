// Numbers of the KV cache: -DKV_E4M3=1 or -DKV_E5M2=1 for 8-bit floats, else scalar_t.
#pragma once
#include "common/dtype.cuh"

#if defined(KV_E4M3) || defined(KV_E5M2)
#define KV_FP8 1
typedef u8 kv_t;
#else
#define KV_FP8 0
typedef scalar_t kv_t;
#endif
