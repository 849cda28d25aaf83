"""Every kernel compiles for every architecture it is meant for, and nothing spills.

NVRTC needs no GPU. What the assembler remarks (C75xx: tensor core instructions put in series, register
hints ignored) costs much speed without any error, so it counts as one here.
"""

import importlib
import os
import pkgutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine.ops
from engine.ops import jit, kernel_cache, nvrtc
from engine.ops.kernel_build import Built, build, compile_all
from engine.ops.kernel_cache import SOURCE_ROOT, Job, KernelCache, flatten
from engine.ops.nvrtc import KernelBuildError
from tests.kernels.models import MODELS, MODELS_BY_ARCH

try:
    nvrtc.version()
except KernelBuildError as error:
    pytest.skip(str(error), allow_module_level=True)


OPS = {
    info.name: module
    for info in pkgutil.iter_modules(engine.ops.__path__)
    if info.name != "kernel_list"
    and hasattr(module := importlib.import_module(f"engine.ops.{info.name}"), "specs")
}


def kernel_specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    return [spec for op in OPS.values() for spec in op.specs(config)]


def test_the_list_of_kernels_is_complete() -> None:
    from engine.ops import kernel_list  # not above: the other tests do without it

    assert {op.__name__ for op in kernel_list.OPS} == {op.__name__ for op in OPS.values()}


def all_jobs(arch: str) -> list[Job]:
    specs = [spec for name in MODELS_BY_ARCH[arch] for spec in kernel_specs(MODELS[name])]
    jobs = [Job.of(s.source, s.defines, arch) for s in specs if jit.supports(s, arch)]
    return list(dict.fromkeys(jobs))


def describe(built: Built) -> str:
    return "\n".join([*built.lines(), *built.entry.warnings])


@pytest.mark.parametrize("arch", jit.ALL_ARCHS)
def test_every_variant_compiles_without_spills(arch: str) -> None:
    jobs = all_jobs(arch)
    built = build(jobs, KernelCache(), workers=len(os.sched_getaffinity(0)))
    assert [one.job for one in built] == jobs
    spilling = [
        describe(one) for one in built if any(r.spill_bytes for r in one.entry.resources.values())
    ]
    assert not spilling, "\n".join(spilling)
    warned = [describe(one) for one in built if one.entry.warnings]
    assert not warned, "\n".join(warned)


def test_every_spec_names_an_entry_of_its_source() -> None:
    for config in MODELS.values():
        for spec in kernel_specs(config):
            arch = spec.archs[-1]
            found = KernelCache().find(Job.of(spec.source, spec.defines, arch))
            if found is None:
                (one,) = build([Job.of(spec.source, spec.defines, arch)], KernelCache())
                found = one.entry
            assert spec.name in found.resources, f"{spec.source} has no kernel {spec.name}"
            assert found.resources[spec.name].registers > 0


def test_every_source_is_reached_by_a_spec() -> None:
    named = {spec.source for config in MODELS.values() for spec in kernel_specs(config)}
    present = {path.name for path in SOURCE_ROOT.glob("*.cu")}
    assert named == present


# --- flattening ---


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cuda"
    (folder / "common").mkdir(parents=True)
    monkeypatch.setattr(kernel_cache, "SOURCE_ROOT", folder)
    flatten.cache_clear()
    yield folder
    flatten.cache_clear()


def test_includes_are_put_in_once_with_their_lines(root: Path) -> None:
    (root / "common/a.cuh").write_text("#pragma once\nint a;\n")
    (root / "common/b.cuh").write_text('#pragma once\n#include "common/a.cuh"\nint b = oops;\n')
    (root / "k.cu").write_text(
        '#include "common/a.cuh"\n#include "common/b.cuh"\n\nvoid k() { also_oops; }\n'
    )
    text = flatten("k.cu")
    assert text.count("int a;") == 1
    assert "pragma once" not in text
    assert "#include" not in text
    with pytest.raises(KernelBuildError) as caught:
        nvrtc.compile_cubin(text, ["-arch=sm_80", "-default-device"])
    assert "cuda/common/b.cuh(3)" in str(caught.value)
    assert "cuda/k.cu(4)" in str(caught.value)


def test_a_missing_include_is_named(root: Path) -> None:
    (root / "k.cu").write_text('#include "common/gone.cuh"\n')
    with pytest.raises(KernelBuildError, match=r"common/gone\.cuh: no such kernel source"):
        flatten("k.cu")


# --- cache and workers ---

TRIVIAL = """
#include "common/scale.cuh"
extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= FACTOR * BASE; }
"""


@pytest.fixture
def trivial(root: Path) -> Path:
    (root / "common/scale.cuh").write_text("#define BASE 1.f\n")
    (root / "scale.cu").write_text(TRIVIAL)
    return root


def jobs_for(*factors: int) -> list[Job]:
    return [Job.of("scale.cu", {"FACTOR": factor}, "sm_80") for factor in factors]


def test_the_second_build_finds_the_first(trivial: Path, tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "cache")
    steps: list[tuple[int, int, str]] = []
    first = build(jobs_for(2, 3), cache, progress=lambda *step: steps.append(step))
    assert [one.cached for one in first] == [False, False]
    assert [step[:2] for step in steps] == [(1, 2), (2, 2)]
    again = build(jobs_for(2, 3), cache, require_cached=True)
    assert [one.cached for one in again] == [True, True]
    assert [one.entry for one in again] == [one.entry for one in first]
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    assert "scale (sm_80 FACTOR=2): cached" in again[0].lines()[0]


def test_a_changed_include_is_a_different_kernel(trivial: Path, tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "cache")
    build(jobs_for(2), cache)
    (trivial / "common/scale.cuh").write_text("#define BASE 5.f\n")
    flatten.cache_clear()
    assert cache.find(jobs_for(2)[0]) is None


@pytest.mark.parametrize(
    "damage", ["truncated cubin", "no cubin", "truncated record", "foreign record"]
)
def test_a_damaged_entry_is_compiled_again(trivial: Path, tmp_path: Path, damage: str) -> None:
    cache = KernelCache(tmp_path / "cache")
    (job,) = jobs_for(2)
    (built,) = build([job], cache)
    intact = built.entry.path.read_bytes()
    record = built.entry.path.with_suffix(".json")
    match damage:
        case "truncated cubin":
            built.entry.path.write_bytes(intact[:100])
        case "no cubin":
            built.entry.path.unlink()
        case "truncated record":
            record.write_text(record.read_text()[:40])
        case "foreign record":
            record.write_text("[1, 2]")
    with pytest.raises(KernelBuildError, match=r"1 kernels are not in .*scale\.cu"):
        build([job], cache, require_cached=True)
    (again,) = build([job], cache)
    assert not again.cached
    assert again.entry.path.read_bytes() == intact


def test_a_directory_that_others_may_write_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    cache = KernelCache(shared)
    assert cache.directory != shared
    assert cache.directory.is_dir()
    assert "others may write to it" in caplog.text


def test_workers_compile_what_one_process_would(trivial: Path, tmp_path: Path) -> None:
    jobs = jobs_for(2, 3, 4)
    one = {b.job: b for b in compile_all(jobs, KernelCache(tmp_path / "a"), workers=1)}
    two = {b.job: b for b in compile_all(jobs, KernelCache(tmp_path / "b"), workers=2)}
    assert one.keys() == two.keys() == set(jobs)
    for job in jobs:
        assert one[job].entry.path.read_bytes() == two[job].entry.path.read_bytes()


def test_an_error_in_a_worker_brings_the_compilers_words(trivial: Path, tmp_path: Path) -> None:
    jobs = [*jobs_for(2), Job.of("scale.cu", {"FACTOR": "nonsense"}, "sm_80")]
    with pytest.raises(KernelBuildError, match=r'identifier "nonsense" is undefined'):
        list(compile_all(jobs, KernelCache(tmp_path / "c"), workers=2))


def test_the_log_tells_registers_and_warnings() -> None:
    log = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'one' for 'sm_90a'\n"
        "ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem, 400 bytes cmem[0]\n"
        "ptxas info    : Compiling entry function 'two' for 'sm_90a'\n"
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async serialized\n"
        "ptxas info    : Used 7 registers, used 0 barriers\n"
    )
    resources = nvrtc.parse_resources(log)
    assert resources["one"] == nvrtc.Resources(40, 20, 16, 128)
    assert resources["two"] == nvrtc.Resources(7, 0, 0, 0)
    assert len(nvrtc.parse_warnings(log)) == 1
    assert nvrtc.parse_warnings("k.cu(3): warning #177-D: variable was declared but never used")


@pytest.mark.parametrize(
    ("arch", "supported"),
    [("sm_80", True), ("sm_86", True), ("sm_89", False), ("sm_90a", False), ("sm_120", False)],
)
def test_architectures_in_between_take_the_nearest_older(arch: str, supported: bool) -> None:
    assert jit.supports(jit.VariantSpec("k.cu", "k", archs=("sm_80",)), arch) is supported


def test_same_macros_are_one_compilation() -> None:
    specs = kernel_specs(MODELS["Qwen2.5-7B"])
    jobs = Counter(Job.of(s.source, s.defines, "sm_90a") for s in specs)
    assert {count for job, count in jobs.items() if job.source == "logprobs.cu"} == {2}
