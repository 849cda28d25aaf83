"""python -m tokenizer_proc.template_worker: renders chat templates in a process that can be killed.

A template is a program. In a sandbox it cannot reach Python, but it can run for ever, also in one
operation that no thread of its process gets past (`10 ** 10 ** 9`), and it can eat memory. So it runs
here, with its memory limited, and `tokenizer_proc/templates.py` kills this process when it takes too
long.

Standard input is a socket. A message is its length as 4 bytes, little-endian, and MessagePack:

    -> [template, variables, seconds]      <- ["text", text], ["syntax", line, why] or ["error", why]

The kernel ends this process a little after `seconds` by itself, should nobody be left to kill it.

The environment has what templates are written for: that of transformers' apply_chat_template.
"""

import json
import resource
import signal
import socket
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec
from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY = 2 << 30  # bytes of address space
GRACE_S = 1.0
READY = ["ready"]


class GenerationTag(Extension):
    """{% generation %} marks what an assistant wrote, for training; here it is only a bracket."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own filter: no escapes for HTML, and letters as they are."""
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, indent=indent, **options)


def strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def build_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


ENVIRONMENT = build_environment()


@lru_cache(16)
def compiled(template: str) -> Template:
    return ENVIRONMENT.from_string(template)


def render(template: str, variables: dict[str, Any]) -> list[Any]:
    try:
        return ["text", compiled(template).render(variables)]
    except TemplateSyntaxError as error:
        return ["syntax", error.lineno, str(error.message)]
    except MemoryError:
        return ["error", "it takes too much memory"]
    except RecursionError:
        return ["error", "it is nested too deeply"]
    except (
        Exception
    ) as error:  # its code is data of the model or of a request: it can raise anything
        return ["error", str(error) or type(error).__name__]


def send(connection: socket.socket, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(4, "little") + data)


def receive(connection: socket.socket) -> Any:
    """The next message. Raises EOFError when the other side has ended."""
    size = int.from_bytes(read_exactly(connection, 4), "little")
    return msgspec.msgpack.decode(read_exactly(connection, size))


def read_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=0)
    send(connection, READY)
    try:
        while True:
            template, variables, seconds = receive(connection)
            signal.setitimer(signal.ITIMER_REAL, seconds + GRACE_S)
            answer = render(template, variables)
            signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                send(connection, answer)
            except UnicodeEncodeError:
                send(connection, ["error", "it makes text that is not Unicode"])
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    main()
