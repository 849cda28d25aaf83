"""Settings of the HTTP server: one dataclass, from which the command line is derived."""

# ruff: noqa: RUF009  (`arg` makes a field, as `dataclasses.field` does)

import os
from dataclasses import dataclass
from pathlib import Path

from engine.api.config import arg

VERSION = "0.1.0"
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class ServerConfig:
    """What the server is asked to do. The engine's own settings are in `EngineConfig`."""

    host: str = arg(
        "127.0.0.1",
        "address to listen on; 0.0.0.0 for all, and then anyone who reaches it may send requests",
        "http",
        metavar="ADDR",
    )
    port: int = arg(8000, "port to listen on; 0: any free one", "http", metavar="N")
    served_model_name: list[str] = arg(
        [],
        "names that requests may use; the first labels the metrics (default: the --model text)",
        "http",
        metavar="NAME",
        nargs="+",
    )
    max_body_size: int = arg(
        32 * 1024 * 1024, "largest request body in bytes; more is refused", "http", metavar="BYTES"
    )
    sse_keep_alive: float = arg(
        15.0,
        "seconds of silence in a stream before a comment line is sent; 0: never",
        "http",
        metavar="S",
    )
    write_timeout: float = arg(
        60.0,
        "seconds that a stream's client may leave a write waiting, until its request is aborted",
        "http",
        metavar="S",
    )
    drain_timeout: float = arg(
        30.0,
        "seconds that running requests get to finish after SIGTERM",
        "http",
        metavar="S",
    )
    stall_timeout: float = arg(
        60.0,
        "seconds without a step, while requests wait, until /health says so",
        "http",
        metavar="S",
    )
    max_queued_requests: int = arg(
        2048,
        "completions waiting to be started before new requests get 429; a longer queue makes "
        "everybody in it wait longer",
        "http",
        metavar="N",
    )
    chat_template: str = arg(
        "",
        "Jinja file to use in place of the model's own chat template",
        "model",
        metavar="FILE",
    )
    generation_config: str = arg(
        "auto",
        "auto: defaults for temperature, top_p, top_k and the like come from the model's "
        "generation_config.json; none: temperature 1 and everything else off",
        "model",
        choices=("auto", "none"),
    )
    enable_log_requests: bool = arg(
        False,
        "one log line for each finished request, other than probes and /metrics",
        "logging",
        aliases=("--disable-log-requests",),
    )


def child_environment() -> dict[str, str]:
    """The environment of our other processes: they must find these packages, wherever we run."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
