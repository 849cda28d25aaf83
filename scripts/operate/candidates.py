"""What scripts/tune.py tries: one setting changed at a time, starting from what the server does by itself."""

import os
from dataclasses import dataclass, field
from typing import Any

from scripts.operate.machine import cpu_flags

BLOCK_SIZES = {"cpu": (8, 16, 32, 64, 128), "cuda": (16, 32, 64, 128)}
MOST_GPU_SEQS = 1024  # MAX_BATCH of engine/ops/plan_decode.py
BASELINE = "as it is"
AGAIN = "as it is, again"
COMBINED = "together"
NOT_TRIED = {
    **dict.fromkeys(("host", "port"), "every trial listens on a free port of this machine"),
    **dict.fromkeys(
        ("ssl-certfile", "ssl-keyfile", "ssl-ca-certs", "ssl-cert-reqs"),
        "every trial speaks plain HTTP",
    ),
    **dict.fromkeys(
        ("api-key", "api-key-file", "admin-key"), "every trial gets a key for its load test"
    ),
    "config": "give each of its settings as a --try of its own",
}


@dataclass(frozen=True)
class Candidate:
    """Flags of serve.py beside those that all trials have; `flags`: name without dashes -> value."""

    name: str
    flags: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, setting: str, value: object) -> "Candidate":
        return cls(f"{setting} {value}", {setting: str(value)})

    @property
    def tokens(self) -> list[str]:
        return [f"--{name}={value}" for name, value in self.flags.items()]


@dataclass(frozen=True)
class Load:
    """What matters of bench_serve.py's options here."""

    most_clients: int | None  # of a closed loop; None: an open one, in which any number may come

    def may_exceed(self, seqs: int) -> bool:
        return self.most_clients is None or self.most_clients > seqs


def own_candidates(info: dict[str, Any], load: Load, fixed: set[str]) -> list[Candidate]:
    """The most promising first. `info`: /server_info of the baseline; `fixed`: settings that the user gave."""
    limits, engine = info["limits"], info["engine"]
    is_cpu = limits["device"] == "cpu"
    budget, seqs, block = (
        limits["max_num_batched_tokens"], limits["max_num_seqs"], limits["block_size"],
    )  # fmt: skip
    values: list[tuple[str, object]] = [("max-num-batched-tokens", 2 * budget)]
    if is_cpu:
        values += [("cpu-threads", n) for n in other_threads(engine["cpu_threads"])]
    is_overlapped = engine["overlap"] == "on" or (engine["overlap"] == "auto" and not is_cpu)
    values.append(("overlap", "off" if is_overlapped else "on"))
    if budget // 2 >= seqs:
        values.append(("max-num-batched-tokens", budget // 2))
    sizes = BLOCK_SIZES["cpu" if is_cpu else "cuda"]
    values += [("block-size", size) for size in (2 * block, block // 2) if size in sizes]
    caches = limits["enable_prefix_caching"]
    values.append(("enable-prefix-caching", "false" if caches else "true"))
    most_seqs = budget if is_cpu else min(budget, MOST_GPU_SEQS)
    if load.may_exceed(seqs) and 2 * seqs <= most_seqs:
        values.append(("max-num-seqs", 2 * seqs))
    if load.may_exceed(seqs // 2) and seqs > 1:
        values.append(("max-num-seqs", seqs // 2))
    if is_cpu and limits["dtype"] == "bfloat16":
        values.append(("dtype", "float32"))
    elif is_cpu and limits["dtype"] == "float32" and has_bfloat16():
        values.append(("dtype", "bfloat16"))
    values.append(("max-num-batched-tokens", 4 * budget))
    values.append(("admission", "greedy" if engine["admission"] == "peak" else "peak"))
    return [Candidate.of(*value) for value in values if value[0] not in fixed]


def other_threads(asked: int) -> list[int]:
    cores = len(os.sched_getaffinity(0))
    now = asked or max(1, cores - 1)
    return [n for n in dict.fromkeys((cores, max(1, cores - 1), max(1, cores // 2))) if n != now]


def has_bfloat16() -> bool:
    return bool({"avx512_bf16", "amx_bf16"} & cpu_flags())


def parse_try(text: str) -> list[Candidate]:
    """`block-size=8,32` -> two candidates. Raises ValueError with advice."""
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("_", "-")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not name or not found:
        raise ValueError(f"{text!r}: write NAME=VALUE or NAME=VALUE,VALUE, as in block-size=8,32")
    if name in NOT_TRIED:
        raise ValueError(f"--try {text}: {NOT_TRIED[name]}; leave it out")
    return [Candidate.of(name, value) for value in found]
