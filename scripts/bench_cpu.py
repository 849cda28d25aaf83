#!/usr/bin/env python3
"""Measure a server on a CPU, and transformers beside it in the same run.

    python scripts/bench_cpu.py                    # starts its own server with the default model
    python scripts/bench_cpu.py --url http://127.0.0.1:8000 --no-peers
    python scripts/bench_cpu.py --json result.json --threads 2 --dtype float32

Load: a closed loop. `concurrency` clients each send the next request when the last one has ended;
prompts are random token ids, all different, so the prefix cache cannot help. Every request asks for
an exact number of tokens. What is reported:

    TTFT    request sent -> first piece of text, seconds
    ITL     gap between two pieces of text of one request, milliseconds
    tok/s   completion tokens of all requests / time from the first start to the last end
    prefill prompt tokens / TTFT of one request alone, for a long prompt

Speeds of a shared machine vary by tens of percent between runs. Only ratios within one run mean much.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.api.config import ConfigError  # noqa: E402
from scripts.bench_command import parse as parse_with_json  # noqa: E402
from scripts.bench_command import save  # noqa: E402
from scripts.loadtest.options import at_least_one, count_float, positive  # noqa: E402
from scripts.operate.process_tree import idle_cpu_percent, is_running  # noqa: E402
from scripts.operate.server_process import free_port  # noqa: E402
from server.command import run_command  # noqa: E402
from server.default_model import BarProgress, ensure_default_model  # noqa: E402

PROMPT_IDS = range(100, 10_000)  # ordinary tokens in every vocabulary we serve
REQUEST_TIMEOUT_S = 600


# --- one request, one level of load -------------------------------------------------------------


@dataclass
class Sample:
    """One finished request. Times in seconds of one monotonic clock."""

    start: float
    piece_times: list[float] = field(default_factory=list)  # arrival of each piece of text
    end: float = 0.0
    prompt_tokens: int = 0  # as the server counted
    completion_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.piece_times[0] - self.start

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.piece_times, self.piece_times[1:], strict=False)]


@dataclass
class Level:
    """Figures of one concurrency."""

    concurrency: int
    requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_s: float


def percentile(values: list[float], q: float) -> float:
    """The q-quantile (0..1), linear between the two nearest values; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summarize(concurrency: int, samples: list[Sample]) -> Level:
    ttfts = [sample.ttft for sample in samples]
    gaps = [gap for sample in samples for gap in sample.gaps]
    wall = max(s.end for s in samples) - min(s.start for s in samples)
    return Level(
        concurrency=concurrency,
        requests=len(samples),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p99_s=percentile(ttfts, 0.99),
        itl_p50_ms=1e3 * percentile(gaps, 0.5),
        itl_p99_ms=1e3 * percentile(gaps, 0.99),
        tokens_per_s=sum(s.completion_tokens for s in samples) / wall,
    )


class Client:
    """Sends completions to one server and times what comes back."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, headers: Any) -> None:
        self.session = session
        self.url = url
        self.model = model
        self.headers = headers

    async def complete(self, prompt: list[int], max_tokens: int) -> Sample:
        """Stream one completion of exactly `max_tokens`. Raises RuntimeError if it ends otherwise."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sample = Sample(start=time.perf_counter())
        async with self.session.post(
            f"{self.url}/v1/completions", json=body, headers=self.headers
        ) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self.take(sample, json.loads(line[6:]))
        sample.end = time.perf_counter()
        if sample.completion_tokens != max_tokens:
            raise RuntimeError(f"asked {max_tokens} tokens, got {sample.completion_tokens}")
        return sample

    def take(self, sample: Sample, event: dict[str, Any]) -> None:
        if "error" in event:
            raise RuntimeError(f"the stream ended with an error: {event['error']}")
        if event.get("usage"):
            sample.prompt_tokens = event["usage"]["prompt_tokens"]
            sample.completion_tokens = event["usage"]["completion_tokens"]
        if any(choice.get("text") for choice in event["choices"]):
            sample.piece_times.append(time.perf_counter())


async def run_level(
    client: Client, concurrency: int, per_client: int, shape: tuple[int, int], limit_s: float
) -> list[Sample]:
    """`concurrency` clients with `per_client` requests each; none starts after `limit_s` seconds.

    `shape`: tokens in, tokens out.
    """
    num_in, num_out = shape
    rng = random.Random(concurrency)
    prompts = [rng.choices(PROMPT_IDS, k=num_in) for _ in range(concurrency * per_client)]
    deadline = time.perf_counter() + limit_s
    samples: list[Sample] = []
    bar = progress_bar(f"concurrency {concurrency}", len(prompts))

    async def one_client() -> None:
        for _ in range(per_client):
            if samples and time.perf_counter() > deadline:
                return
            samples.append(await client.complete(prompts.pop(), num_out))
            bar.update()

    try:
        with bar:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(one_client())
    except ExceptionGroup as failures:  # one failed; the others were cancelled
        raise failures.exceptions[0] from None
    return samples


async def run_prefill(client: Client, num_in: int, repeats: int) -> list[Sample]:
    """Long prompts, one at a time, one token out."""
    rng = random.Random(num_in)
    samples = []
    with progress_bar(f"prefill {num_in}", repeats) as bar:
        for _ in range(repeats):
            samples.append(await client.complete(rng.choices(PROMPT_IDS, k=num_in), 1))
            bar.update()
    return samples


def progress_bar(name: str, total: int) -> Any:
    return tqdm(total=total, desc=name, unit="req", leave=False, disable=not sys.stderr.isatty())


def tell(line: str) -> None:
    """Progress where no bar is shown, so that a long run in a log file is seen to move."""
    if not sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


# --- the server under test ----------------------------------------------------------------------


@contextmanager
def own_server(model: Path, dtype: str, threads: int, log: Path) -> Iterator[tuple[str, int]]:
    """Start scripts/serve.py; yield its address and process id once it has bound its port."""
    port = free_port()
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), "--model", str(model)]
    command += ["--port", str(port), "--dtype", dtype, "--cpu-threads", str(threads)]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}", server.pid
    finally:
        server.terminate()
        try:
            server.wait(40)
        except BaseException as error:  # it takes too long, or we are told again to end
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise


async def wait_ready(
    session: aiohttp.ClientSession, url: str, pid: int | None, limit_s: float
) -> float:
    """Seconds until /ready answers 200. Raises RuntimeError if the server ends or takes too long.

    `pid`: of our own server, which may not listen yet; that of another one is expected to.
    """
    start = time.perf_counter()
    hidden = not sys.stderr.isatty()
    bar = tqdm(desc="starting", bar_format="{desc}: {elapsed}", leave=False, disable=hidden)
    with bar:
        while time.perf_counter() - start < limit_s:
            if pid is not None and not is_running(pid):
                raise RuntimeError("the server ended while starting")
            try:
                async with session.get(f"{url}/ready") as response:
                    if response.status in (200, 404):  # 404: a server without /ready
                        return time.perf_counter() - start
            except aiohttp.ClientConnectionError as error:
                if pid is None and isinstance(error, aiohttp.ClientConnectorError):
                    raise RuntimeError(f"--url {url}: {error}; is the server started?") from None
            bar.update()
            await asyncio.sleep(0.05)
    raise RuntimeError(f"not ready after {limit_s:.0f} s")


# --- the whole run ------------------------------------------------------------------------------


@dataclass
class Result:
    levels: list[Level] = field(default_factory=list)
    prefill_tokens: int = 0
    prefill_ttft_s: float = float("nan")
    startup_s: float | None = None
    idle_cpu_percent: float | None = None
    peers: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefill_tokens / self.prefill_ttft_s


async def measure(args: argparse.Namespace, url: str, pid: int | None) -> Result:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    result = Result(prefill_tokens=args.long_prompt)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        startup = await wait_ready(session, url, pid, args.start_timeout)
        tell(f"ready after {startup:.1f} s")
        result.startup_s = startup if pid is not None else None
        async with session.get(f"{url}/v1/models", headers=headers) as response:
            response.raise_for_status()
            model = (await response.json())["data"][0]["id"]
        client = Client(session, url, model, headers)
        shape = (args.prompt_tokens, args.output_tokens)
        await client.complete(random.Random(0).choices(PROMPT_IDS, k=shape[0]), 8)  # warm up
        for concurrency in args.concurrency:
            samples = await run_level(client, concurrency, args.repeats, shape, args.level_seconds)
            level = summarize(concurrency, samples)
            result.levels.append(level)
            tell(
                f"concurrency {concurrency}: {level.requests} requests, {level.tokens_per_s:.1f} tok/s"
            )
        samples = await run_prefill(client, args.long_prompt, args.repeats)
        result.prefill_ttft_s = statistics.median(sample.ttft for sample in samples)
        tell(f"prefill {args.long_prompt}: {result.prefill_tokens_per_s:.0f} tok/s")
        if pid is not None and args.idle_seconds > 0:
            await asyncio.sleep(0.5)  # let the last request's clean-up end
            result.idle_cpu_percent = await idle_cpu_percent(pid, args.idle_seconds)
    return result


def run_peer(name: str, model: Path, args: argparse.Namespace) -> dict[str, float] | None:
    """Figures of another engine from a process of its own, or None (it says why on stderr)."""
    command = [sys.executable, str(ROOT / "scripts" / "bench_cpu_peers.py"), name, str(model)]
    for flag in ("threads", "prompt_tokens", "output_tokens", "long_prompt", "repeats"):
        command += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            timeout=args.peer_timeout,
            check=False,
            text=True,
        )
    except subprocess.TimeoutExpired:
        print(f"{name}: not done after {args.peer_timeout} s, given up", file=sys.stderr)
        return None
    return json.loads(done.stdout) if done.returncode == 0 else None


# --- the report ---------------------------------------------------------------------------------


def table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    head = "  ".join(cell.rjust(w) for cell, w in zip(header, widths, strict=True))
    return "\n".join([head, *lines])


def level_table(levels: list[Level]) -> str:
    header = ["clients", "requests", "TTFT p50 s", "p99 s", "ITL p50 ms", "p99 ms", "tok/s"]
    rows = [
        [
            *(str(level.concurrency), str(level.requests)),
            *(f"{level.ttft_p50_s:.3f}", f"{level.ttft_p99_s:.3f}"),
            *(f"{level.itl_p50_ms:.1f}", f"{level.itl_p99_ms:.1f}"),
            f"{level.tokens_per_s:.1f}",
        ]
        for level in levels
    ]
    return table(header, rows)


def comparable(result: Result) -> dict[str, float]:
    """Our figures under the names that peers report theirs."""
    figures = {f"batch {x.concurrency}, tok/s": x.tokens_per_s for x in result.levels}
    figures[f"prefill {result.prefill_tokens}, tok/s"] = result.prefill_tokens_per_s
    for level in result.levels:
        if level.concurrency == 1:
            figures["TTFT, s"] = level.ttft_p50_s
    return figures


def peer_table(result: Result) -> str:
    """Ours beside each peer's; ratios above 1 mean that ours is better."""
    ours = comparable(result)
    header, rows = ["", "ours"], [[name, f"{value:.3g}"] for name, value in ours.items()]
    for peer, theirs in result.peers.items():
        header += [peer, "ratio"]
        for row, (name, value) in zip(rows, ours.items(), strict=True):
            other = theirs.get(name)
            if other is None:
                row += ["-", "-"]
                continue
            ratio = other / value if name.startswith("TTFT") else value / other
            row += [f"{other:.3g}", f"{ratio:.2f}"]
    return table(header, rows)


def report(result: Result) -> str:
    parts = [level_table(result.levels), ""]
    parts.append(
        f"prompt of {result.prefill_tokens} tokens: TTFT {result.prefill_ttft_s:.3f} s, "
        f"prefill {result.prefill_tokens_per_s:.0f} tok/s"
    )
    if result.startup_s is not None:
        parts.append(f"ready after {result.startup_s:.1f} s")
    if result.idle_cpu_percent is not None:
        parts.append(f"idle: {result.idle_cpu_percent:.1f} % of one core")
    if result.peers:
        parts += ["", peer_table(result)]
    return "\n".join(parts)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--url", help="measure this server instead of starting one")
    add("--api-key", default="", help="sent as a bearer token")
    add("--model", type=Path, help="model directory (default: the default model)")
    add("--dtype", default="float32", help="of the started server; transformers runs float32")
    cores = len(os.sched_getaffinity(0))
    add("--threads", type=at_least_one, default=cores, help="CPU threads of server and peers alike")
    add(
        "--concurrency",
        type=at_least_one,
        nargs="+",
        default=[1, 4, 8, 16],
        help="clients at a time, a level each; each level takes up to --level-seconds and its last "
        "requests",
    )
    add("--prompt-tokens", type=at_least_one, default=64, help="tokens of each prompt, random ids")
    add(
        "--output-tokens",
        type=at_least_one,
        default=64,
        help="tokens of each answer, exactly; time grows with them",
    )
    add("--long-prompt", type=at_least_one, default=1000, help="tokens of the prefill measurement")
    add("--repeats", type=at_least_one, default=2, help="requests per client, and prefills")
    add("--level-seconds", type=count_float, default=60, help="no request starts later than this")
    add("--idle-seconds", type=count_float, default=5, help="how long to watch the idle server")
    add("--start-timeout", type=positive, default=600, help="seconds to wait for /ready")
    add(
        "--peer-timeout",
        type=positive,
        default=600,
        help="seconds for one peer, which is given up then",
    )
    add("--no-peers", action="store_true", help="do not run transformers")
    add(
        "--peer-llama-cpp", type=Path, metavar="GGUF", help="also run llama-cpp-python on this file"
    )
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parse_with_json(parser, argv)
    if args.url is not None and not args.url.startswith(("http://", "https://")):
        parser.error(
            f"--url {args.url!r}: give http://HOST:PORT, or leave it out to start a server"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    folder = Path(tempfile.mkdtemp(prefix="bench-cpu-"))
    log = folder / "server.log"
    keep_log = False
    try:
        model = args.model
        if model is None and (args.url is None or not args.no_peers):
            model = ensure_default_model(BarProgress())
        if args.url is not None:
            result = asyncio.run(measure(args, args.url.rstrip("/"), None))
        else:
            with own_server(model, args.dtype, args.threads, log) as (url, pid):
                result = asyncio.run(measure(args, url, pid))
    except (RuntimeError, ConfigError, aiohttp.ClientError) as error:
        keep_log = log.exists()
        hint = f" (the server's output is in {log})" if keep_log else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if not keep_log:
            shutil.rmtree(folder, ignore_errors=True)
    peers = {} if args.no_peers else {"transformers": model}
    if args.peer_llama_cpp is not None:
        peers["llama.cpp"] = args.peer_llama_cpp
    for name, path in peers.items():
        figures = run_peer(name, path, args)
        if figures is not None:
            result.peers[name] = figures
    print(report(result))
    return 0 if save(args.json, asdict(result)) else 1


def end_on(number: int) -> None:
    """Let a signal unwind the stack, so that our server and our folder do not outlive us."""
    if signal.getsignal(number) != signal.SIG_IGN:  # nohup has SIGHUP ignored
        signal.signal(number, lambda number, frame: sys.exit(128 + number))


if __name__ == "__main__":
    end_on(signal.SIGTERM)
    end_on(signal.SIGHUP)
    sys.exit(run_command("bench_cpu.py", main))
