"""What scripts that measure an engine say before they do."""

import importlib
import sys
from types import ModuleType
from typing import NoReturn

import pytest
import torch

from tests.contracts.source import ROOT


@pytest.fixture(params=["bench_latency", "bench_throughput"])
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Ends where it would build an engine."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module(request.param)

    def built(*args: object, **settings: object) -> NoReturn:
        raise SystemExit("an engine is built")

    monkeypatch.setattr(module.Driver, "of_model", built)
    return module


@pytest.mark.parametrize(
    ("flags", "has_gpu", "is_told"),
    [
        ([], False, True),
        (["--device", "auto", "--model", "tiny"], False, True),
        (["--device", "cpu"], False, False),
        (["--device", "cuda"], False, False),  # the engine refuses it
        ([], True, False),
    ],
)
def test_that_the_cpu_is_measured_is_told_first_unless_asked_for(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    has_gpu: bool,
    is_told: bool,
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *flags])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(SystemExit, match="an engine is built"):
        script.main()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == is_told
    words = (f"{script.__name__}.py: ", "no GPU", "CPU", "0.5b", "not for 7b", "--device cpu")
    assert [word for word in words if (word in err) != is_told] == []
