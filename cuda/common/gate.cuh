// f(x) of gated MLPs: y = f(gate) * up (https://arxiv.org/abs/2002.05202).
#pragma once
#include "common/dtype.cuh"

DEV float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
DEV float gelu(float x) { return 0.5f * x * (1.f + erff(x * 0.70710678118654752f)); }
DEV float gelu_tanh(float x) {  // section 2 of https://arxiv.org/abs/1606.08415
  const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.f + tanhf(inner));
}
