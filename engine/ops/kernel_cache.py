"""Compiled kernels on disk, so that only the first start of a version compiles.

    <cache>/<key>.cubin     what the device loads
    <cache>/<key>.json      checksum of the cubin, log, time taken; written after the cubin

<cache> is $XDG_CACHE_HOME/sluice/kernels, or ~/.cache/sluice/kernels, readable by its owner alone: what
lies there runs on the device. The key is a hash of everything that shapes the result, the text of the
included files among it. Files appear by renaming, so several processes may fill the cache at once; one
that does not match its checksum counts as absent.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.ops import nvrtc
from engine.ops.nvrtc import Binary, KernelBuildError, Resources

logger = logging.getLogger(__name__)

SOURCE_ROOT = Path(__file__).resolve().parents[2] / "cuda"
FORMAT = 1  # of the files in the cache; raise it when their meaning changes
OPTIONS = (
    "--std=c++17",
    "-default-device",
    "-lineinfo",
    "--ptxas-options=-v",  # registers and spills into the log
)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*$', re.MULTILINE)
PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once.*$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """One compilation: a source of cuda/, macros, and the architecture to compile for."""

    source: str  # relative to cuda/
    defines: tuple[tuple[str, str], ...]
    arch: str  # as NVRTC says it: sm_80, sm_89, sm_90a

    @classmethod
    def of(cls, source: str, defines: Mapping[str, object] | None, arch: str) -> "Job":
        pairs = ((name, str(value)) for name, value in (defines or {}).items())
        return cls(source, tuple(sorted(pairs)), arch)

    @property
    def options(self) -> list[str]:
        macros = [f"-D{name}={value}" for name, value in self.defines]
        return [f"-arch={self.arch}", *OPTIONS, *macros]

    @property
    def key(self) -> str:
        """Hex name of the result in the cache. Raises KernelBuildError without NVRTC."""
        parts = [str(FORMAT), str(nvrtc.version()), *self.options, flatten(self.source)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


@dataclass(frozen=True)
class Entry:
    """A compiled source in the cache."""

    path: Path  # of the cubin
    log: str
    milliseconds: float  # that compiling took, when it was compiled

    @property
    def resources(self) -> dict[str, Resources]:
        return nvrtc.parse_resources(self.log)

    @property
    def warnings(self) -> list[str]:
        return nvrtc.parse_warnings(self.log)


def source_path(source: str) -> Path:
    """Where cuda/`source` is."""
    return SOURCE_ROOT / source


@cache
def flatten(source: str) -> str:
    """Text of cuda/`source` with our own includes in place, each once.

    `#line` marks keep the compiler's messages pointing at the right file. An include counts wherever
    it stands, so it must not depend on a macro; `#pragma once` is implied. Read once per process.
    """
    seen: set[Path] = set()

    def expand(path: Path) -> str:
        if not path.is_file():
            raise KernelBuildError(f"{path}: no such kernel source")
        seen.add(path)
        text = PRAGMA_ONCE.sub("", path.read_text(encoding="utf-8"))
        shown = path.relative_to(SOURCE_ROOT.parent)
        pieces, position = [f'#line 1 "{shown}"\n'], 0
        for match in INCLUDE.finditer(text):
            pieces.append(text[position : match.start()])
            position = match.end()
            beside = (path.parent / match[1]).resolve()
            included = beside if beside.is_file() else (SOURCE_ROOT / match[1]).resolve()
            if included not in seen:
                line = text.count("\n", 0, match.start()) + 2
                pieces.append(f'{expand(included)}\n#line {line} "{shown}"')
        pieces.append(text[position:])
        return "".join(pieces)

    return expand(source_path(source))


class KernelCache:
    """A directory of compiled kernels."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or default_directory()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        problem = make_private(self.directory)
        if problem:
            self._temporary = tempfile.TemporaryDirectory(prefix="sluice-kernels-")
            logger.warning(
                "compiled kernels are not kept: %s cannot be used (%s). Make it a directory of this "
                "user with mode 0700, or point XDG_CACHE_HOME elsewhere",
                self.directory,
                problem,
            )
            self.directory = Path(self._temporary.name)

    def find(self, job: Job) -> Entry | None:
        """The intact result of `job`, if it is here."""
        cubin, meta = self.paths(job)
        try:
            record = json.loads(meta.read_text(encoding="utf-8"))
            if record["sha256"] != hashlib.sha256(cubin.read_bytes()).hexdigest():
                return None
            return Entry(cubin, str(record["log"]), float(record["milliseconds"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None  # absent, or cut off by a full disk or a crash: compile it again

    def store(self, job: Job, binary: Binary, milliseconds: float) -> Entry:
        cubin, meta = self.paths(job)
        milliseconds = round(milliseconds, 1)
        record = {
            "sha256": hashlib.sha256(binary.cubin).hexdigest(),
            "milliseconds": milliseconds,
            "source": job.source,
            "options": job.options,
            "log": binary.log,
        }
        write_file(cubin, binary.cubin)
        write_file(meta, json.dumps(record, indent=1).encode())
        return Entry(cubin, binary.log, milliseconds)

    def paths(self, job: Job) -> tuple[Path, Path]:
        key = job.key
        return self.directory / f"{key}.cubin", self.directory / f"{key}.json"


def default_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification tells programs to ignore a relative path here.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "sluice" / "kernels"


def make_private(directory: Path) -> str:
    """Make `directory` if need be. Returns what keeps it from being used safely, "" if nothing."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        return str(error)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        return "others may write to it"
    if not os.access(directory, os.W_OK | os.X_OK):
        return "it is not writable"
    return ""


def write_file(path: Path, contents: bytes) -> None:
    """Whole or not at all, whoever else writes the same file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(contents)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
