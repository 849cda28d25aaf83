"""A whole run, in order: look at the server, warm up, rounds of all levels, results."""

import argparse
import math
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from scripts.loadtest import outputs, report
from scripts.loadtest.client import Target
from scripts.loadtest.dataset import read_dataset
from scripts.loadtest.figures import Round, summarize
from scripts.loadtest.fleet import ClientFailed, Fleet, RoundResult, Stop
from scripts.loadtest.records import Level
from scripts.loadtest.result import LevelResult, RunResult
from scripts.loadtest.watch import ServerInfo, Unreachable, Watch
from scripts.loadtest.workload import Workload

CLIENT_LIMIT_PERCENT = 90.0  # of a core: above, the client's own speed is part of the figures
SHORT_ROUND_S = 1.0  # below, CPU use is that of connecting
LATE_LIMIT_MS = 20.0  # open loop: requests sent later than planned
CACHED_LIMIT_PERCENT = 10.0  # of prompt tokens, beyond what --shared-prefix makes
SECRET = {"api_key", "header"}
DEFAULT_CONCURRENCY = (1, 4, 8, 16)


@dataclass(frozen=True)
class Plan:
    """The command line, made into the parts of a run."""

    args: argparse.Namespace
    info: ServerInfo
    target: Target
    workload: Workload
    levels: list[Level]

    def count(self, level: Level) -> int | None:
        """Requests of one round of a level; None: as many as fit into --seconds."""
        if self.args.requests is not None:
            return int(self.args.requests)
        limited = math.isfinite(self.args.seconds)
        if level.mode == "closed":
            return None if limited else max(16, 4 * int(level.value))
        # more than will arrive, for all that chance does: four standard deviations
        expected = level.value * self.args.seconds
        return math.ceil(expected + 4 * math.sqrt(expected) + 4) if limited else 100


def make_plan(args: argparse.Namespace) -> Plan:
    """Raises ValueError or OSError with advice, Unreachable if no server answers."""
    base = base_of(args.url)
    headers = dict(args.header)
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    info = ServerInfo(base, headers)
    chat = args.endpoint == "chat"
    if chat and args.prompts == "ids":
        raise ValueError(
            "--prompts ids: chat takes no token ids; use text, or --endpoint completions"
        )
    dataset = read_dataset(args.dataset) if args.dataset is not None else []
    check_dataset(dataset, chat)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    workload = Workload(
        model=args.model or first_model(info),
        chat=chat,
        text=chat or args.prompts == "text",
        input_len=args.input_len,
        output_len=args.output_len,
        shared_prefix=args.shared_prefix,
        token_ids=args.token_ids,
        dataset=dataset,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        usage=not args.no_usage,
        extra=args.extra_body,
        seed=args.seed,
    )
    if args.rate:
        levels = [Level("open", rate) for rate in args.rate]
    else:
        levels = [Level("closed", n) for n in args.concurrency or DEFAULT_CONCURRENCY]
        most = max(level.value for level in levels)
        if args.requests is not None and args.requests < most:
            raise ValueError(
                f"--requests {args.requests} keeps fewer than {most:g} clients busy: give at least "
                f"{most:g}, better four times as many, or a lower --concurrency"
            )
    target = Target(base + path, headers, args.timeout, args.retries)
    return Plan(args, info, target, workload, list(dict.fromkeys(levels)))


def base_of(url: str) -> str:
    """--url without /v1. Raises ValueError with advice, in which no password is shown."""
    if "@" in url:
        shown = re.sub("(^|//).*@", r"\1...@", url)
        raise ValueError(
            f"--url {shown}: give name and password by --header 'Authorization: Basic ...', or a key "
            "by --api-key; in a path, write %40"
        )
    if not url.isprintable() or " " in url:
        raise ValueError(f"--url {url!a}: leave out blanks and control characters")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url {url}: begin it with http:// or https://")
    try:
        parts = urlsplit(url)
        port = parts.port  # raises, too
    except ValueError as error:
        raise ValueError(f"--url {url}: {error}") from None
    if not parts.hostname or port == 0 or "?" in url or "#" in url:
        raise ValueError(f"--url {url}: write http://HOST:PORT, and maybe a path")
    return url.rstrip("/").removesuffix("/v1")


def check_dataset(rows: list[Any], chat: bool) -> None:
    if not chat and any(row.messages is not None for row in rows):
        raise ValueError("--dataset has `messages`: use --endpoint chat")
    if chat and any(isinstance(row.prompt, list) for row in rows):
        raise ValueError("--dataset has token ids, which chat does not take: use text")


def first_model(info: ServerInfo) -> str:
    models = info.models()
    if not models:
        raise ValueError(f"{info.base}/v1/models names no model: give --model (or --api-key)")
    return models[0]


def settings_of(plan: Plan) -> dict[str, Any]:
    """The command line for the record, without secrets."""
    found = {}
    for name, value in vars(plan.args).items():
        if name in SECRET or name == "self_test" or value in (None, [], {}):
            continue
        plain = isinstance(value, str | int | float | bool | list | dict)
        found[name] = value if plain else str(value)
    found["model"] = plan.workload.model
    found["headers"] = sorted(name for name, _ in plan.args.header)
    return found


def run(args: argparse.Namespace) -> int:
    """Exit code: 0; 1 if no request of the whole run succeeded, or a result could not be written; 2 if
    the options are wrong; 130 after Ctrl-C."""
    try:
        outputs.check_writable(args.json, args.plots)
        plan = make_plan(args)
        server = plan.info.describe()
    except (ValueError, OSError, Unreachable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, Unreachable) else 2
    found = RunResult(
        settings_of(plan),
        server,
        levels=[LevelResult(level) for level in plan.levels],
        when=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    stop = Stop()
    with stopping(stop), Fleet(plan.target, plan.workload, args.processes, stop) as fleet:
        try:
            warm_up(plan, fleet)
            measure(plan, fleet, found)
        except ClientFailed as error:
            print(f"error: {error}", file=sys.stderr)
            found.notes.append("A client process ended: this is what there was until then.")
    found.notes += client_notes(found) + answer_notes(found)
    if stop.requested:
        found.notes.append("Interrupted: this is what there was until then.")
    is_saved = outputs.save(args.json, args.plots, found)
    if stop.requested:
        return 130
    return 0 if is_saved and any(level.value("completed") for level in found.measured) else 1


def warm_up(plan: Plan, fleet: Fleet) -> None:
    """All at once, and not measured. Errors are told, as the rounds will hardly fare better."""
    number = plan.args.warmup
    if not number:
        return
    line = report.LiveLine()
    line.begin("warm-up", number)
    # a round and a level that no measured request has, so that no prompt is met again
    done = fleet.run(Level("closed", number), -1, -1, number, tell=line.show)
    line.end(brief(summarize(done.records)))


def measure(plan: Plan, fleet: Fleet, found: RunResult) -> None:
    """Rounds outside, levels inside: a machine that changes shows as spread, not as a level's fault."""
    line = report.LiveLine()
    for round_number in range(plan.args.rounds):
        for number, level in enumerate(found.levels):
            if fleet.stop.requested:
                return
            count = plan.count(level.level)
            line.begin(f"round {round_number + 1}/{plan.args.rounds}, {level.level.name}", count)
            with Watch(plan.info) as watch:
                done = fleet.run(
                    level.level, number, round_number, count, plan.args.seconds, line.show
                )
            one = make_round(plan, level.level, done, watch, fleet.stop.requested)
            if done.records:
                level.rounds.append(one)
            line.end(brief(one))
            if not one.values.get("completed") and not fleet.stop.requested:
                found.notes.append(
                    f"Not one request of {line.name} succeeded, so no others were sent."
                )
                return


def make_round(plan: Plan, level: Level, done: RoundResult, watch: Watch, stopped: bool) -> Round:
    slo = plan.args.slo
    one = summarize(done.records, slo.is_met if slo else None, is_open=level.mode == "open")
    one.values["client_cpu_percent"] = done.cpu_percent
    one.values |= watch.figures()
    one.interrupted = stopped
    if stopped:
        one.values["given_up"] = done.abandoned
    return one


def brief(one: Round) -> str:
    values = one.values
    text = f"{values['completed']:.0f} done"
    if one.errors:
        text += ", failed: " + ", ".join(f"{n} x {kind}" for kind, n in one.errors.items())
    if "output_tps" in values:
        text += f", {values['output_tps']:,.0f} tok/s"
    if "ttft_p50_ms" in values:
        text += f", TTFT p50 {values['ttft_p50_ms']:,.0f} ms"
    return text


def client_notes(found: RunResult) -> list[str]:
    """Was it the client that could not do more?"""
    busy = {
        level.level.name: cpu
        for level in found.measured
        if (cpu := level.value("client_cpu_percent") or 0.0) > CLIENT_LIMIT_PERCENT
        and (level.value("duration_s") or 0.0) >= SHORT_ROUND_S
    }
    notes = []
    if busy:
        levels = ", ".join(f"{name} ({cpu:.0f}% of a core)" for name, cpu in busy.items())
        notes.append(
            f"The client was the limit at {levels}: the server may do better. Use more --processes, "
            "on cores that the server does not need."
        )
    late = [
        level.level.name
        for level in found.measured
        if (level.value("late_p99_ms") or 0.0) > LATE_LIMIT_MS
    ]
    if late:
        notes.append(
            f"The client sent requests more than {LATE_LIMIT_MS:g} ms late at {', '.join(late)}: it "
            "has too little CPU. Use more --processes, or another machine for the client."
        )
    return notes


def answer_notes(found: RunResult) -> list[str]:
    """Were the answers what was asked for?"""
    notes = []
    for level in found.measured:
        got, asked = level.value("output_tokens_mean"), level.value("output_asked_mean")
        if got is not None and asked is not None and got < 0.95 * asked:
            notes.append(
                f"Answers at {level.level.name} had {got:.0f} tokens on average, not the {asked:.0f} "
                "asked for: they ended by themselves. --ignore-eos makes runs comparable."
            )
            break
    cached = max(
        (level.value("server_prefix_hit_percent") or 0.0 for level in found.measured), default=0.0
    )
    if cached > 100 * found.settings.get("shared_prefix", 0.0) + CACHED_LIMIT_PERCENT:
        notes.append(
            f"The server had up to {cached:.0f}% of the prompt tokens in its prefix cache: it has seen "
            "these prompts before. For new ones choose another --seed, or start the server again."
        )
    if any(level.value("without_text") for level in found.measured):
        notes.append("Some complete answers had no text: they have no TTFT, ITL and TPOT.")
    return notes


@contextmanager
def stopping(stop: Stop) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks for an early end, a second one ends at once."""

    def on_signal(number: int, frame: object) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
