"""Settings of the HTTP server: one dataclass, from which the command line is derived."""

# ruff: noqa: RUF009  (`arg` makes a field, as `dataclasses.field` does)

import dataclasses
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.api.config import ConfigError, arg

VERSION = "0.1.0"
REPOSITORY = Path(__file__).resolve().parent.parent
API_KEY_VARIABLE = "SLUICE_API_KEY"
ADMIN_KEY_VARIABLE = "SLUICE_ADMIN_KEY"
KEY_VARIABLES = (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE)


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def check_file(flag: str, name: str) -> None:
    """Raises ConfigError if the file that a flag names cannot be read as one."""
    try:
        is_file = stat.S_ISREG(os.stat(name).st_mode)
    except FileNotFoundError:
        raise ConfigError(f"{flag} {name}: there is no such file") from None
    except OSError as error:  # such as a folder that only root may look into
        raise ConfigError(f"{flag} {name}: {error.strerror}") from None
    if not is_file:
        raise ConfigError(f"{flag} {name}: is no regular file")


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
    trust_request_chat_template: bool = arg(
        False,
        "let requests bring a chat template of their own; it runs in a sandbox in a process of its "
        "own, but still is a program of theirs, which may take two seconds of a core",
        "model",
    )
    tool_call_parser: str = arg(
        "auto",
        "how the model writes tool calls; auto: as its chat template says, and requests with tools "
        "are refused where that is not certain. A format that the model was not trained for works "
        "less well; a template without tools then gets them in a system message",
        "model",
        choices=("auto", "none", "hermes", "llama3_json", "mistral", "json"),
    )
    reasoning_parser: str = arg(
        "none",
        "split the model's reasoning off its answers; deepseek_r1: models that always reason, "
        "perhaps without the mark <think>; qwen3: those that write <think>, or whose template does",
        "model",
        choices=("none", "deepseek_r1", "qwen3"),
    )
    reasoning_field: str = arg(
        "reasoning_content",
        "name of the field with the reasoning in answers; both sends it twice",
        "model",
        choices=("reasoning_content", "reasoning", "both"),
    )
    generation_config: str = arg(
        "auto",
        "auto: defaults for temperature, top_p, top_k and the like come from the model's "
        "generation_config.json; none: temperature 1 and everything else off",
        "model",
        choices=("auto", "none"),
    )
    log_requests: str = arg(
        "off",
        "on: one log line for each request that has ended, with sizes, times and outcome; prompts: "
        "its prompt as well, which may hold what nobody should read; probes are never logged",
        "logging",
        choices=("off", "on", "prompts"),
    )
    disable_log_stats: bool = arg(
        False,
        "no line of rates, running and waiting requests and KV use every 10 s; /metrics has these in any case",
        "logging",
    )
    api_key: list[str] = arg(
        [],
        "key that requests must bring; may be given several times. Others on this machine see it in "
        f"the list of processes: --api-key-file and the environment's {API_KEY_VARIABLE} hide it",
        "access",
        metavar="KEY",
    )
    api_key_file: str = arg(
        "",
        "file with more keys, one a line, each with a name and limits of its own if it needs some: "
        "`KEY name=alice requests-per-minute=60`; read once, at the start",
        "access",
        metavar="FILE",
    )
    admin_key: str = arg(
        "",
        "key for /server_info, /admin/... and /start_profile, which do not exist without one; it opens "
        f"everything else, too. Or the environment's {ADMIN_KEY_VARIABLE}",
        "access",
        metavar="KEY",
    )
    protect_metrics: bool = arg(
        False, "/metrics needs a key as well: give Prometheus one of its own", "access"
    )
    allowed_origins: list[str] = arg(
        [],
        "origins whose web pages may call the server from a browser, given several "
        "times or as a JSON list; * for all",
        "access",
        metavar="ORIGIN",
    )
    allowed_methods: list[str] = arg(
        ["*"], "methods that such pages may use", "access", metavar="METHOD"
    )
    allowed_headers: list[str] = arg(
        ["*"], "request headers that such pages may send", "access", metavar="HEADER"
    )
    allow_credentials: bool = arg(
        False, "such pages may send cookies; not together with origin *", "access"
    )
    ssl_certfile: str = arg(
        "",
        "certificate with its chain, in PEM: serve HTTPS. SIGHUP reads it again, instead of ending the "
        "server",
        "access",
        metavar="FILE",
    )
    ssl_keyfile: str = arg(
        "",
        "its private key, unencrypted, if it is not in the same file",
        "access",
        metavar="FILE",
    )
    ssl_ca_certs: str = arg(
        "",
        "certificates of those who sign the certificates of clients",
        "access",
        metavar="FILE",
    )
    ssl_cert_reqs: int = arg(
        0,
        "0: ask clients for no certificate; 1: check one if they have it; 2: demand one",
        "access",
        metavar="N",
    )
    request_timeout: float = arg(
        0.0,
        "seconds a request may take from arrival to its last token, the most that its own `timeout` "
        "can ask for; what is not finished by then is lost; 0: any time",
        "http",
        metavar="S",
    )
    queue_timeout: float = arg(
        600.0,
        "seconds a request may wait to be started, then it gets 503; shorter tells clients sooner "
        "that the server is too busy; 0: any time",
        "http",
        metavar="S",
    )
    done_after_error: bool = arg(
        False,
        "send [DONE] even after an error in a stream, for clients that wait for it; naive ones then "
        "take the error for success",
        "http",
    )
    strict_fields: bool = arg(
        False,
        "refuse requests with fields that nobody knows, rather than ignore the fields",
        "http",
    )
    clamp_max_tokens: bool = arg(
        False,
        "lower a max_tokens that does not fit behind the prompt, rather than refuse the request; "
        "clients then do not learn that they get less",
        "http",
    )
    max_n: int = arg(128, "most choices that a request may ask for", "http", metavar="N")
    max_stop: int = arg(16, "most stop strings of a request", "http", metavar="N")
    max_logprobs: int = arg(
        20, "most log-probabilities for each token that a request may ask for", "http", metavar="N"
    )
    enable_request_metrics: bool = arg(
        False,
        "put `metrics`, the times that a request took, into every answer; else only where the "
        "header X-Request-Metrics: 1 asks for them",
        "http",
    )
    page: bool = arg(
        True,
        "serve the page with a chat and a live view at /; it needs no key itself, what it asks for "
        "does. Without it / is 404",
        "http",
        aliases=("--disable-page",),
    )
    key_limits: str = arg(
        "",
        "what each key may ask for, where its line in --api-key-file does not say otherwise: "
        "requests-per-minute=N, tokens-per-minute=N (prompts and completions) and live-requests=N "
        "(completions at once), separated by commas; more gets 429, also while the server is idle",
        "access",
        metavar="LIMITS",
    )
    expose_model_path: bool = arg(
        False,
        "`root` in /v1/models is what --model says, not the served name: clients then know a path of "
        "this machine",
        "http",
    )


SECRETS = ("api_key", "admin_key")


def shown_settings(config: Any) -> dict[str, Any]:
    """The fields of a configuration for people to read, keys left out."""
    values = dataclasses.asdict(config)
    return {k: "set" if k in SECRETS and v else v for k, v in values.items()}


def with_environment(config: ServerConfig) -> ServerConfig:
    """`config` with the keys that the environment holds. Raises ConfigError if one is empty."""
    keys, admin = list(config.api_key), config.admin_key
    for name in KEY_VARIABLES:
        if name in os.environ and not os.environ[name].strip():
            raise ConfigError(f"{name} is empty in the environment: unset it, or give it a key")
    if API_KEY_VARIABLE in os.environ:
        keys.append(os.environ[API_KEY_VARIABLE].strip())
    if not admin:
        admin = os.environ.get(ADMIN_KEY_VARIABLE, "").strip()
    return dataclasses.replace(config, api_key=keys, admin_key=admin)


def child_environment() -> dict[str, str]:
    """The environment of our other processes: they must find these packages, wherever we run, and
    need no keys."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    kept = {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
    return {**kept, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
