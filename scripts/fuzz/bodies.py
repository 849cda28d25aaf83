"""Bodies for the POST paths of a description: right ones, nearly right ones, and wrong bytes."""

import json
import random
from dataclasses import dataclass
from typing import Any

from scripts.fuzz.values import near, right

SPLICES = [
    b"NaN", b"Infinity", b"1e400", b"-", b"\xff\xfe", b"\xef\xbb\xbf", b"\\ud800", b"\x00", b"[" * 300,
    b"{" * 300, b'{"a":' * 200, b"]", b"}", b'"', b",", b"\\u0000", b"9" * 400, b"null", b"'", b"\n",
    b"0x1", b"\xf0\x9f\x98", b"\xed\xa0\x80",
]  # fmt: skip


@dataclass(frozen=True)
class Body:
    path: str
    data: bytes
    kind: str  # right, near or bytes


class Bodies:
    """Draws bodies from what /openapi.json says of the POST paths."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self._paths = [
            (path, self._schema(methods["post"]))
            for path, methods in document["paths"].items()
            if "post" in methods and not path.startswith(("/admin", "/start", "/stop"))
        ]
        generating = [p for p in self._paths if p[0].endswith("completions")]
        self._weighted = self._paths + generating * 6  # where most of the code is

    def _schema(self, operation: dict[str, Any]) -> dict[str, Any]:
        if "requestBody" not in operation:
            return {"type": "object"}
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        return self._schemas[schema["$ref"].rpartition("/")[2]]

    def draw(self, rng: random.Random) -> Body:
        path, schema = rng.choice(self._weighted)
        value = cheap(right(schema, rng), path, rng)
        kind = rng.choice(["right", "right", "near", "near", "bytes"])
        if kind == "near":
            for _ in range(rng.choice([1, 1, 1, 2, 5])):
                value = near(value, rng)
            if isinstance(value, dict):
                value = cheap(value, path, rng)
        data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        return Body(path, wrong_bytes(data, rng) if kind == "bytes" else data, kind)


def cheap(value: dict[str, Any], path: str, rng: random.Random) -> dict[str, Any]:
    """Fewer and shorter completions, so that a run is about requests and not about tokens."""
    if not path.endswith("completions"):
        return value
    value, names = dict(value), ["max_tokens"]
    if "chat" in path:
        names.append("max_completion_tokens")
    for name in names:
        if (name not in value and name == "max_tokens") or is_large(value.get(name), 16):
            value[name] = rng.randint(1, 12)
    if rng.random() < 0.99:
        for name in ("n", "best_of", "min_tokens"):
            if is_large(value.get(name), 4):
                value[name] = rng.randint(1, 4)
    return value


def is_large(value: Any, most: int) -> bool:
    return isinstance(value, int | float) and most < value < 2**31


def wrong_bytes(data: bytes, rng: random.Random) -> bytes:
    """Up to four changes: bits, cuts, repeats, and things that parsers trip over."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice([1, 1, 2, 8, 40]))
        match rng.randrange(5):
            case 0:
                flipped = bytes(b ^ (1 << rng.randrange(8)) for b in data[at : at + 1])
                data = data[:at] + flipped + data[at + 1 :]
            case 1:
                data = data[:at] + data[end:]
            case 2:
                data = data[:end] + data[at:]
            case 3:
                data = data[:at]
            case _:
                data = data[:at] + rng.choice(SPLICES) + data[at:]
    return data
