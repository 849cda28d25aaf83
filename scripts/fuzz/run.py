"""Many attempts at once, beside streams whose text must not change."""

import asyncio
import json
import math
import random
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from socket import SO_LINGER, SOL_SOCKET
from typing import Any
from urllib.parse import urlsplit

from scripts.fuzz.bodies import Bodies
from scripts.fuzz.judge import judge, read_answers
from scripts.fuzz.wire import LEAVE, RESET, Attempt, Wire

LIMIT_S = 120.0  # after which a connection counts as hanging
SETTLE_S = 10.0
NUM_STREAMS = 4
STREAM_TOKENS = 100
NEAR = 0.5  # of log-probabilities: far more than batches change, far less than other tokens' keys would


@dataclass
class Report:
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    num_streams: int = 0
    memory: list[dict[str, float]] = field(default_factory=list)  # MiB by process, over the run
    seconds: float = 0.0

    def lines(self) -> list[str]:
        result = [f"{sum(self.kinds.values())} connections in {self.seconds:.0f} s"]
        result += [f"  {kind}: {count}" for kind, count in self.kinds.most_common()]
        result += [f"  {count:6d} x {outcome}" for outcome, count in self.outcomes.most_common()]
        result.append(f"{self.num_streams} streams beside them")
        result += [f"memory in MiB: {json.dumps(entry)}" for entry in self.memory]
        return result + [f"FINDING {finding}" for finding in self.findings]


class Unusable(Exception):
    """There is no server to be tested; the text says what to do."""


class Target:
    """The server under test. Raises Unusable for a URL of another kind."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http":
            raise Unusable(f"{url}: requests are written to a plain http:// port")
        self._address = parts.hostname or "127.0.0.1", parts.port or 80

    async def send(self, attempt: Attempt) -> bytes:
        """All that comes back until the connection ends. Raises TimeoutError if it does not."""
        reader, writer = await asyncio.open_connection(*self._address, limit=2**24)
        async with asyncio.timeout(LIMIT_S), closing(writer):
            try:
                for piece in attempt.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if attempt.end in (LEAVE, RESET):
                    await asyncio.sleep(0.002)
                    if attempt.end == RESET:
                        linger = struct.pack("ii", 1, 0)
                        writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, linger)
                    return b""
                if attempt.half_close:
                    await asyncio.sleep(0.05)  # a connection that is half closed counts as gone
                    writer.write_eof()
                return await reader.read()
            except ConnectionError:
                return b""  # the server refused to read on

    async def call(self, method: str, path: str, body: Any = None) -> bytes:
        """The body of a 200. Raises AssertionError otherwise."""
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: fuzz\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        received = await self.send(Attempt("call", [head.encode() + data]))
        try:
            answers = read_answers(received)
        except ValueError as error:
            raise AssertionError(f"{method} {path}: {error}") from None
        assert [answer.status for answer in answers] == [200], f"{method} {path}: {answers}"
        return answers[0].body

    async def metrics(self) -> dict[str, float]:
        text = (await self.call("GET", "/metrics")).decode()
        pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}


@asynccontextmanager
async def closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()


@dataclass
class Said:
    """What a stream has said, token by token."""

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    best: list[dict[str, float]] = field(default_factory=list)  # the two likeliest

    def disturbed(self, other: "Said") -> str | None:
        """How the other differs from this, the same stream without neighbours; None if not.

        A GPU's last bits depend on the batch: values may differ a little, and where two tokens are nearly
        as likely the texts may part. What comes after that has nothing in common.
        """
        for i, token in enumerate(self.tokens[: len(other.tokens)]):
            if token != other.tokens[i]:
                lost = self.logprobs[i] - self.best[i].get(other.tokens[i], -math.inf)
                return None if lost < NEAR else f"token {i} is {other.tokens[i]!r}, not {token!r}"
            if abs(self.logprobs[i] - other.logprobs[i]) > NEAR:
                return f"token {i} has {other.logprobs[i]:.3f}, not {self.logprobs[i]:.3f}"
        if len(self.tokens) != len(other.tokens):
            return f"{len(other.tokens)} tokens, not {len(self.tokens)}"
        return None


async def stream_text(target: Target, index: int) -> Said:
    """One of the streams beside: greedy, with log-probabilities, in which a disturbance shows first."""
    body = {
        "prompt": f"Stream {index}: a server answers requests",
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 2,
        "stream": True,
    }
    data = (await target.call("POST", "/v1/completions", body)).decode()
    events = [event.removeprefix("data: ") for event in data.split("\n\n") if event]
    assert events[-1:] == ["[DONE]"], f"a stream has no end: {data[-300:]!r}"
    said = Said()
    for event in events[:-1]:
        chunk = json.loads(event)
        assert "choices" in chunk, f"a stream failed: {event}"
        lists = chunk["choices"][0]["logprobs"]
        if lists is not None:
            said.tokens += lists["tokens"]
            said.logprobs += lists["token_logprobs"]
            said.best += lists["top_logprobs"]
    return said


async def fuzz(url: str, num: int, seed: int, workers: int, only: int | None = None) -> Report:
    """`num` attempts drawn from `seed`; each depends on its own number alone. `only`: that one.

    Raises Unusable if the server is not ready to begin with, or busy; if it ends on the way, that is a finding.
    """
    target, report = Target(url), Report()
    await check_ready(target, url)
    began = time.monotonic()
    try:
        await attack_beside_streams(
            target, report, range(num) if only is None else [only], seed, workers
        )
    except* (OSError, AssertionError) as broken:
        texts = dict.fromkeys(str(error) or repr(error) for error in broken.exceptions)
        report.findings += [f"the run broke off: {text}" for text in texts]
    report.seconds = time.monotonic() - began
    return report


async def attack_beside_streams(
    target: Target, report: Report, chosen: Sequence[int], seed: int, workers: int
) -> None:
    """Fill `report`. Raises OSError and AssertionError, alone or as a group, if the server ends."""
    document = json.loads(await target.call("GET", "/openapi.json"))
    wire = Wire(Bodies(document), list(document["paths"]))
    numbers = iter(chosen)
    texts = [await stream_text(target, i) for i in range(NUM_STREAMS)]
    idle = await metrics_when_idle(target)
    is_over = asyncio.Event()

    async def attack() -> None:
        for number in numbers:
            attempt = wire.draw(random.Random(f"{seed}/{number}"))
            report.kinds[attempt.name] += 1
            try:
                complaints, seen = judge(attempt, await target.send(attempt))
            except TimeoutError:
                complaints, seen = ["no answer: it hangs"], ["hangs"]
            except OSError as error:
                complaints, seen = [f"cannot connect: {error}"], ["cannot connect"]
            report.outcomes.update(seen)
            for complaint in complaints:
                written = b" ".join(attempt.pieces)[:600]
                report.findings.append(f"#{number} {attempt.name}: {complaint}\n    {written!r}")
            if number % max(1, len(chosen) // 8) == 0:
                report.memory.append(memory_of(await target.metrics()))

    async def stream(index: int) -> None:
        while not is_over.is_set():
            if difference := texts[index].disturbed(await stream_text(target, index)):
                report.findings.append(f"stream {index} is not as without the others: {difference}")
            report.num_streams += 1

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream(i)) for i in range(NUM_STREAMS)]
        await asyncio.gather(*(attack() for _ in range(workers)))
        is_over.set()
        await asyncio.gather(*streams)
    report.findings += await unsettled(target, idle)
    report.memory.append(memory_of(await target.metrics()))


async def check_ready(target: Target, url: str) -> None:
    """Raises Unusable."""
    try:
        await target.call("GET", "/ready")
        await target.call("GET", "/v1/models")
    except OSError as error:  # a TimeoutError as well
        raise Unusable(
            f"{url}: nothing answers ({error or 'in time'}); start the server first (python "
            "scripts/serve.py), wait for /ready, and give the port that it says"
        ) from None
    except (AssertionError, ValueError) as error:
        raise Unusable(
            f"{url}: no server that is ready and needs no key answers there: {error}"
        ) from None


async def metrics_when_idle(target: Target) -> dict[str, float]:
    """The gauges follow the engine by up to a tenth of a second: wait until they say that nothing runs.

    Raises Unusable if others keep the server busy.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        metrics = await target.metrics()
        busy = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        if not any(value for key, value in metrics.items() if key.startswith(busy)):
            return metrics
        if time.monotonic() > deadline:
            raise Unusable("others use this server: it does not become idle; take one of your own")
        await asyncio.sleep(0.1)


def memory_of(metrics: dict[str, float]) -> dict[str, float]:
    name = "srv:process_resident_memory_bytes"
    return {
        key.partition('process="')[2].partition('"')[0]: round(value / 2**20, 1)
        for key, value in metrics.items()
        if key.startswith(name)
    }


async def unsettled(target: Target, idle: dict[str, float]) -> list[str]:
    """What is not as it was before, some seconds after the last request."""
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "srv:free_blocks")
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = await target.metrics()
        changed = [
            f"{key} was {value:g} and is {now.get(key)}"
            for key, value in idle.items()
            if key.startswith(gauges) and now.get(key) != value
        ]
        if not changed or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    for path in ("/health", "/ready", "/live"):
        await target.call("GET", path)
    return changed
