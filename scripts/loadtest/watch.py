"""What the server tells about itself: its model, version and settings, and /metrics during a round."""

import http.client
import re
import ssl
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from scripts.loadtest.foreign import decode

PERIOD_S = 1.0
PATIENCE_S = 3.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the load: by no proxy

# Figure -> metric names of several servers. All samples of the first name that is there are summed.
GAUGES = {
    "kv_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "memory_bytes": ("srv:process_resident_memory_bytes", "process_resident_memory_bytes"),
    "gpu_memory_bytes": ("srv:gpu_memory_used_bytes",),
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
}
COUNTERS = {
    "preemptions": ("vllm:num_preemptions_total",),
    "prefix_queries": ("vllm:prefix_cache_queries_total",),
    "prefix_hits": ("vllm:prefix_cache_hits_total",),
}
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Unreachable(Exception):
    """Nothing answers at the address; the text says what to look at."""


@dataclass(frozen=True)
class ServerInfo:
    """GET requests with the headers of the test."""

    base: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    def get(self, path: str) -> bytes | None:
        """The body of a 200; None if there is no such page, or it takes too long.

        Raises Unreachable if there is no connection.
        """
        request = urllib.request.Request(self.base + path, headers=self.headers)
        try:
            with DIRECT.open(request, timeout=PATIENCE_S) as response:
                body: bytes = response.read()
                return body
        except urllib.error.HTTPError:
            return None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                return None
            if isinstance(reason, ssl.SSLError):
                raise Unreachable(f"TLS to {self.base} fails: {reason}") from None
            if isinstance(reason, http.client.HTTPException):
                raise Unreachable(f"what answers at {self.base} is no HTTP server") from None
            raise Unreachable(
                f"nothing answers at {self.base} ({reason}): is the server started, "
                "and are --url's host and port its own?"
            ) from None

    def get_json(self, path: str) -> dict[str, Any]:
        try:
            found = decode(self.get(path) or b"null")
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {}

    def models(self) -> list[str]:
        """Names the server lists; empty without the page or the right key."""
        listed = self.get_json("/v1/models").get("data")
        models = listed if isinstance(listed, list) else []
        return [str(one["id"]) for one in models if isinstance(one, dict) and "id" in one]

    def describe(self) -> dict[str, Any]:
        """Models and settings, for the record of a run."""
        found: dict[str, Any] = {"models": self.models()}
        found |= {f"version.{k}": v for k, v in flatten(self.get_json("/version")).items()}
        found |= {f"server_info.{k}": v for k, v in flatten(self.get_json("/server_info")).items()}
        for name, labels, _ in samples((self.get("/metrics") or b"").decode(errors="replace")):
            if name == "vllm:cache_config_info":
                found |= {f"cache_config.{k}": v for k, v in LABEL.findall(labels)}
        return found


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested objects as one level with dotted names."""
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flatten(value, f"{prefix}{key}.")
    return found


def samples(text: str) -> list[tuple[str, str, float]]:
    """(name, labels, value) of each line of Prometheus text that is a sample."""
    found = []
    for name, labels, number in SAMPLE.findall(text):
        try:
            found.append((name, labels, float(number)))
        except ValueError:
            continue
    return found


def read_values(text: str) -> dict[str, float]:
    """The figures above that a /metrics page has."""
    sums: dict[str, float] = {}
    for name, _, value in samples(text):
        sums[name] = sums.get(name, 0.0) + value
    found = {}
    for figure, names in {**GAUGES, **COUNTERS}.items():
        for name in names:
            if name in sums:
                found[figure] = sums[name]
                break
    return found


class Watch(threading.Thread):
    """Reads /metrics once a second while a round runs. Use as a context manager."""

    def __init__(self, info: ServerInfo) -> None:
        super().__init__(daemon=True)
        self.info = info
        self.ended = threading.Event()
        self.seen: list[dict[str, float]] = []

    def __enter__(self) -> "Watch":
        self.look()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join(2 * PATIENCE_S)
        if self.seen:
            self.look()

    def run(self) -> None:
        while self.seen and not self.ended.wait(PERIOD_S):  # a server without metrics: never again
            self.look()

    def look(self) -> None:
        try:
            page = self.info.get("/metrics")
        except Unreachable:
            return
        values = read_values(page.decode(errors="replace")) if page else {}
        if values:
            self.seen.append(values)

    def figures(self) -> dict[str, float]:
        """Peaks of gauges and growth of counters; empty if the server has no metrics."""
        found: dict[str, float] = {}
        for name in GAUGES:
            column = [values[name] for values in self.seen if name in values]
            if column and not (name == "gpu_memory_bytes" and max(column) == 0):  # no GPU
                found[f"server_{name}_peak"] = max(column)
        for name in COUNTERS:
            column = [values[name] for values in self.seen if name in values]
            if column:
                found[f"server_{name}"] = column[-1] - column[0]
        queries = found.pop("server_prefix_queries", 0.0)
        hits = found.pop("server_prefix_hits", 0.0)
        if queries > 0:
            found["server_prefix_hit_percent"] = 100 * hits / queries
        return found
