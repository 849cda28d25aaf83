"""What messages of refused values say of bounds is how the fields behave; all fields that have bounds."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.api.sampling import INTEGERS as INTEGER_BOUNDS
from engine.api.sampling import REALS
from server.config import ServerConfig
from server.errors import ApiError
from server.schema.body import (
    EXPLAINED_BYTES,
    MAX_BRACKETS,
    MAX_COLONS,
    MAX_COMMAS,
    parse_object,
)
from server.schema.chat import CHAT_FIELDS, parse_chat
from server.schema.chat_rules import ChatRules
from server.schema.completions import COMPLETION_FIELDS, parse_completion
from server.schema.fields import Schema
from server.schema.limits import allowed_seconds, check_limits
from server.schema.sampling import SamplingDefaults
from server.schema.tokenize import DETOKENIZE_FIELDS, parse_detokenize

Tries = tuple[float, ...]
Make = Callable[[Any], Any]  # a value of a field, of a number that its bounds are about
MESSAGES = [{"role": "user", "content": "a"}]
DEFAULTS = SamplingDefaults()
ENDPOINTS: dict[str, tuple[Any, dict[str, Any], Callable[[dict[str, Any]], Any]]] = {
    "completions": (
        COMPLETION_FIELDS, {"prompt": "a", "max_tokens": 2**31}, lambda body: parse_completion(body, DEFAULTS),
    ),
    "chat": (
        CHAT_FIELDS, {"messages": MESSAGES, "logprobs": True, "max_tokens": 2**31},
        lambda body: parse_chat(body, DEFAULTS, ChatRules()),
    ),
    "detokenize": (DETOKENIZE_FIELDS, {}, parse_detokenize),
}  # fmt: skip
GENEROUS = ServerConfig()
STRICT = ServerConfig(max_n=100, max_logprobs=5, max_stop=3, request_timeout=30.5)
MOST_ITEMS = 1025
SIZES = (0, 1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 1024, MOST_ITEMS)
WHOLE = (-(2**63) - 1, -(2**63), -(2**31) - 1, -101, -3, -2, -1, *SIZES, 2**31, 2**32, 2**63, 2**64)
NUMBERS = (*WHOLE, -2.5, -1e-9, 1e-9, 0.5, 1.0000001, 2.0000001, 10.0000001, 30.5000001, 100.5)
ITEMS = {"string": "a", "integer": 5}


def makers(schema: Schema) -> Iterator[tuple[str, Make, Tries]]:
    """Of a field's schema: what its bounds are about, how to make a value of it, and what to try."""
    for option in schema.get("anyOf", [schema]):
        kind = option.get("type")
        if kind in ("integer", "number"):
            yield "value", lambda x: x, WHOLE if kind == "integer" else NUMBERS
        elif kind == "string" and "maxLength" in option:
            yield "length", lambda x: "a" * x, SIZES
        elif kind == "array" and option["items"].get("type") in ITEMS:
            item = ITEMS[option["items"]["type"]]
            if option.keys() & {"minItems", "maxItems"}:
                yield "items", lambda x, item=item: [item] * x, SIZES
            for name, make, tries in makers(option["items"]):
                yield f"item {name}", lambda x, make=make: [make(x)], tries
        elif kind == "object" and "maxProperties" in option:
            yield "bias", lambda x: {"5": x}, NUMBERS
            yield "entries", lambda x: {str(i): 0 for i in range(x)}, SIZES


CASES = [
    pytest.param(endpoint, name, what, make, tries, id=f"{endpoint} {name} {what}")
    for endpoint, (table, _, _) in ENDPOINTS.items()
    for name, field in table.items()
    for what, make, tries in makers(field.schema)
]
NUMBER = r"(-?\d+(?:\.\d+)?)(?![\d.]*\d)"
# What a message says of the bounds, and which numbers have to pass by that, and not.
JUST = 1e-6
CLAIMS: dict[str, Callable[..., tuple[list[float], list[float]]]] = {
    rf"between {NUMBER} and {NUMBER}": lambda a, b: ([a, b], [a - 1, b + 1]),
    rf"must have {NUMBER} to {NUMBER} characters": lambda a, b: ([a, b], [a - 1, b + 1]),
    rf"at least {NUMBER}": lambda a: ([a], [a - 1]),
    rf"(?:at most|limited to) {NUMBER}": lambda a: ([a], [a + 1]),
    rf"above {NUMBER}": lambda a: ([a + JUST], [a]),
}


def refusal(endpoint: str, name: str, value: Any, config: ServerConfig) -> str | None:
    """The message, where the value is refused; None where it passes."""
    _, base, parse = ENDPOINTS[endpoint]
    body = parse_object(json.dumps({**base, name: value}).encode())
    try:
        parse(body)
        check_limits(body, config)
        allowed_seconds(body, config)
    except ApiError as error:
        refused = error
    else:
        return None
    assert refused.status == 400
    assert refused.param is not None
    assert refused.param.startswith(name)
    return refused.message


@pytest.mark.parametrize("config", [GENEROUS, STRICT], ids=["generous", "strict"])
@pytest.mark.parametrize(("endpoint", "name", "what", "make", "tries"), CASES)
def test_messages_tell_the_bounds(
    endpoint: str, name: str, what: str, make: Make, tries: Tries, config: ServerConfig
) -> None:
    def told(x: float) -> str | None:
        return refusal(endpoint, name, make(x), config)

    for x in tries:
        message = told(x)
        if message is None:
            continue
        said, _, got = message.partition(", got ")
        if "value" in what and got:
            assert float(got) == pytest.approx(float(x), rel=1e-14)
            assert type(x) is float or "." in got or "e" in got or int(got) == x
        for pattern, claim in CLAIMS.items():
            for found in re.finditer(pattern, said):
                taken, refused = claim(*(float(a) if "." in a else int(a) for a in found.groups()))
                is_size = what.split()[-1] in ("length", "items", "entries")
                possible = range(MOST_ITEMS + 1) if is_size else None
                for bound in taken:
                    assert "by this server" in (told(bound) or "by this server"), message
                for beyond in refused:
                    if possible is None or beyond in possible:
                        assert told(beyond) is not None, message


def test_all_bounds_are_tried() -> None:
    """Else the test above would pass with nothing in it."""
    tried = {(case.values[0], case.values[1]) for case in CASES}
    assert {name for endpoint, name in tried if endpoint == "chat"} >= {
        *(REALS.keys() | INTEGER_BOUNDS.keys() - {"logprobs"}),
        *("max_completion_tokens", "top_logprobs", "timeout", "priority", "cache_salt"),
        *("stop", "bad_words", "logit_bias", "min_tokens", "stop_token_ids", "allowed_token_ids"),
    }
    assert {
        ("completions", "best_of"),
        ("completions", "logprobs"),
        ("detokenize", "tokens"),
    } <= tried


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 123456789012345678901234567890])
def test_integers_beyond_64_bits_are_not_quoted_rounded(number: int) -> None:
    """The JSON parser has made floats of them."""
    for name in ("seed", "max_tokens", "top_k", "n", "priority", "min_tokens", "best_of"):
        message = refusal("completions", name, number, GENEROUS)
        assert message == f"{name} must fit into 64 bits, and the number sent exceeds 64 bits"
    for name, value in (("prompt", [1, number]), ("model", number), ("stop", number)):
        message = refusal("completions", name, value, GENEROUS)
        assert message is not None
        assert "exceeds 64 bits" in message
        assert not re.search(r"\d{5}", message)
    assert refusal("completions", "seed", 2**63, GENEROUS) == (
        "seed must fit into 64 bits, got 9223372036854775808"
    )
    assert refusal("completions", "seed", -(2**63), GENEROUS) is None


def test_a_body_of_very_many_lists_is_refused_before_it_is_read() -> None:
    """In 32 MiB there is room for 11 million, which would hold the event loop for seconds."""
    most = b'{"prompt":[' + b"[]," * (MAX_BRACKETS - 3) + b"[]]}"
    assert len(parse_object(most)["prompt"]) == MAX_BRACKETS - 2
    for body, what in (
        (most.replace(b"[],", b"[],[],", 1), "opening brackets"),
        (most[:-3] + b"[" * 2, "opening brackets"),
        (b'{"prompt":[' + b"0," * (MAX_COMMAS + 1) + b"0]}", "commas"),
        (b"{" + b'"a":0,' * (MAX_COLONS + 1) + b'"a":0}', "colons"),
    ):
        with pytest.raises(ApiError, match=what) as caught:
            parse_object(body)
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_large_bodies_that_are_no_json_are_not_read_again() -> None:
    """To find the path of a surrogate takes ten times as long as to parse."""
    for size, code in ((1000, "invalid_unicode"), (EXPLAINED_BYTES, "invalid_json")):
        with pytest.raises(ApiError) as caught:
            parse_object(b'{"a":"' + b"a" * size + b'\\ud800"}')
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": {"b": ["x", {"c": "\ud800"}]}}, "a.b[1].c"),
        ({"a": [["x"], ["\udfff"]]}, "a[1][0]"),
        ({"a": [{"\ud800": 1}]}, "a[0]"),
        ({"\ud800": 1}, "body"),
        (["\ud800"], "[0]"),
        ("\ud800", "body"),
    ],
)
def test_where_a_lone_surrogate_is(value: Any, path: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(json.dumps(value).encode())
    assert (caught.value.code, caught.value.param) == ("invalid_unicode", path)
