"""Launching through CuPy: argument widths, streams, graphs, devices, shared memory."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.ops import jit, kernel_cache
from engine.ops.kernel_cache import flatten
from engine.ops.nvrtc import KernelBuildError
from tests.gpu.conftest import Record

SOURCE = """
struct Pair { float a; int b; };
struct alignas(64) Wide { unsigned long long v[16]; };

extern "C" __global__ void arguments(
    double* out, int i, long long l, float f, const Pair p, const __grid_constant__ Wide w, int last) {
  out[0] = i; out[1] = (double)l; out[2] = f; out[3] = p.a; out[4] = p.b;
  out[5] = (double)w.v[15]; out[6] = last;
}

extern "C" __global__ void add(float* y, const float* x, float amount) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = x[i] + amount;
}

extern "C" __global__ void through_shared(float* y, int n) {
  extern __shared__ float shared[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) shared[i] = i;
  __syncthreads();
  float sum = 0.f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += shared[n - 1 - i];
  atomicAdd(y, sum);
}
"""


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A source and a cache of our own; nothing of it outlives the test."""
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/jit_test.cu").write_text(SOURCE)
    monkeypatch.setattr(kernel_cache, "SOURCE_ROOT", tmp_path / "cuda")
    monkeypatch.setattr(jit.settings, "cache_dir", tmp_path / "cache")
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(jit, "_report", {})
    flatten.cache_clear()
    yield
    flatten.cache_clear()


def test_arguments_of_every_kind_arrive() -> None:
    kernel = jit.kernel("jit_test.cu", "arguments")
    out = torch.zeros(7, dtype=torch.float64, device="cuda")
    pair = np.array([(1.5, -7)], dtype=[("a", np.float32), ("b", np.int32)])
    for factor in (1, 3):  # the second launch reuses the packed buffer
        wide = np.zeros(1, "V128")
        wide.view(np.uint64)[15] = 12345 * factor
        pair["b"] = -7 * factor
        kernel(
            (1,),
            (1,),
            (
                out.data_ptr(),
                np.int32(-3 * factor),
                np.int64(-(2**40) * factor),
                np.float32(0.25 * factor),
                pair,
                wide,
                np.int32(99 * factor),
            ),
        )
        want = [-3.0 * factor, -(2.0**40) * factor, 0.25 * factor, 1.5, -7.0 * factor]
        assert out.tolist() == [*want, 12345.0 * factor, 99.0 * factor]


@pytest.mark.parametrize("value", [1.5, True, None, np.float64(1), np.zeros(2, np.float32)])
def test_arguments_of_uncertain_width_are_refused(value: object) -> None:
    kernel = jit.kernel("jit_test.cu", "add")
    x = torch.zeros(32, device="cuda")
    with pytest.raises(TypeError, match=r"kernel add, argument 2: .* has no certain width"):
        kernel((1,), (32,), (x.data_ptr(), x.data_ptr(), value))


def test_the_same_kernel_is_returned() -> None:
    one = jit.kernel("jit_test.cu", "add", {"A": 1})
    assert jit.kernel("jit_test.cu", "add", {"A": 1}) is one
    assert jit.kernel("jit_test.cu", "add", {"A": 2}) is not one
    assert {built.job.source for built in jit.report()} == {"jit_test.cu"}
    assert [built.cached for built in jit.report()] == [False, False]


def test_launches_follow_torchs_current_stream() -> None:
    kernel = jit.kernel("jit_test.cu", "add")
    x, y = (torch.zeros(1024, device="cuda") for _ in range(2))
    big = torch.randn(4096, 4096, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(10):  # keeps the stream busy: a launch elsewhere would overtake
            big = (big @ big) * 1e-3
        x.fill_(5.0)
        kernel((4,), (256,), (y.data_ptr(), x.data_ptr(), np.float32(2.0)))
        z = y * 2
    side.synchronize()
    assert (z == 14.0).all(), f"got {z.unique().tolist()}, want 14"


def test_a_captured_launch_sees_new_data(graph_replay: Record) -> None:
    kernel = jit.kernel("jit_test.cu", "add")
    x, y = torch.ones(256, device="cuda"), torch.zeros(256, device="cuda")
    replay = graph_replay(
        lambda: kernel((1,), (256,), (y.data_ptr(), x.data_ptr(), np.float32(0.5)))
    )
    for value in (3.0, -8.0):
        x.fill_(value)
        y.zero_()
        torch.cuda.synchronize()
        replay()
        assert (y == value + 0.5).all(), f"got {y.unique().tolist()}, want {value + 0.5}"


def test_more_shared_memory_than_by_default() -> None:
    n = 90 * 1024 // 4  # fits every supported card
    kernel = jit.kernel("jit_test.cu", "through_shared", smem_bytes=4 * n)
    y = torch.zeros(1, device="cuda")
    kernel((1,), (256,), (y.data_ptr(), np.int32(n)))
    assert y.item() == pytest.approx(n * (n - 1) / 2, rel=1e-5)
    small = jit.kernel("jit_test.cu", "through_shared")
    small((1,), (256,), (y.zero_().data_ptr(), np.int32(100)), smem_bytes=400)
    assert y.item() == 4950
    less = jit.kernel("jit_test.cu", "through_shared", smem_bytes=2 * n)  # the same function
    less((1,), (256,), (y.zero_().data_ptr(), np.int32(100)))
    kernel((1,), (256,), (y.zero_().data_ptr(), np.int32(n)))
    assert y.item() == pytest.approx(n * (n - 1) / 2, rel=1e-5)


def test_another_process_start_finds_the_cubin() -> None:
    first = jit.kernel("jit_test.cu", "add")
    jit._kernels.clear()
    jit._report.clear()
    again = jit.kernel("jit_test.cu", "add")
    assert again is not first
    assert [built.cached for built in jit.report()] == [True]


def test_compiling_can_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.settings, "require_cached", True)
    with pytest.raises(KernelBuildError, match=r"scripts/build_kernels\.py"):
        jit.kernel("jit_test.cu", "add")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_one_kernel_serves_every_device() -> None:
    kernel = jit.kernel("jit_test.cu", "add")
    for index in (1, 0):
        with torch.cuda.device(index):
            x = torch.full((256,), float(index), device="cuda")
            y = torch.zeros(256, device="cuda")
            kernel((1,), (256,), (y.data_ptr(), x.data_ptr(), np.float32(1.0)))
            torch.cuda.synchronize()
        assert (y == index + 1).all()


def test_host_cost_of_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints it; only the results are checked."""
    kernel = jit.kernel("jit_test.cu", "add")
    x, y = torch.ones(256, device="cuda"), torch.zeros(256, device="cuda")
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(200):
            kernel((1,), (256,), (y.data_ptr(), x.data_ptr(), np.float32(0.5)))
        best = min(best, (time.perf_counter() - started) / 200)
    torch.cuda.synchronize()
    with capsys.disabled():
        print(f"\nhost time of a launch: {best * 1e6:.1f} us")
    assert (y == 1.5).all()
