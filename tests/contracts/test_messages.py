"""Every message survives the wire, whatever it holds."""

import enum
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from engine.api import messages
from engine.api.messages import Ingress, Replies, State, Submit, Tokens

UNIONS = {
    "Ingress": Ingress,
    "Submit": Submit,
    "Tokens": Tokens,
    "Replies": Replies,
    "State": State,
}
CASES = [(name, struct) for name, union in UNIONS.items() for struct in get_args(union)]


def sample(kind: inspect.Type, size: int) -> list[Any]:
    """Values of a type that are unlike its defaults. `size`: length of collections."""
    match kind:
        case inspect.BoolType():
            return [True, False]
        case inspect.IntType():
            return [2**40 + size, 0, -1] if kind.ge is None else [kind.ge]
        case inspect.FloatType():
            return [0.125, 1.0]
        case inspect.StrType():
            return ["é😀\x00" * size, ""]
        case inspect.BytesType():
            return [bytes(range(256)) * size, b""]
        case inspect.NoneType():
            return [None]
        case inspect.AnyType():
            return [{"role": "user", "content": [None, 1, 2.5, "x"]}]
        case inspect.EnumType():
            return list(kind.cls)
        case inspect.LiteralType():
            return list(kind.values)
        case inspect.ListType():
            return [spread(kind.item_type, size), []]
        case inspect.DictType():
            keys, values = sample(kind.key_type, size), sample(kind.value_type, size)
            return [{keys[0]: values[0]}, {}]
        case inspect.TupleType():
            return [tuple(column[0] for column in (sample(t, size) for t in kind.item_types))]
        case inspect.UnionType():
            return [value for member in kind.types for value in sample(member, size)]
        case inspect.StructType():
            return build(kind.cls, size)
    raise AssertionError(f"teach this test about {kind}")


def spread(kind: inspect.Type, size: int) -> list[Any]:
    values = sample(kind, size)
    return [values[i % len(values)] for i in range(size * len(values))]


def in_range(name: str, value: Any) -> Any:
    """Sampling parameters check their ranges: keep the generated values inside."""
    # fmt: off
    limits: dict[str, Any] = {
        "n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.25, "min_tokens": 3, "max_tokens": 4,
        "presence_penalty": -1.0, "frequency_penalty": 1.5, "repetition_penalty": 1.25,
        "stop": ["a", "é"], "stop_token_ids": [7], "logprobs": 3, "logit_bias": {5: -1.5}, "seed": -9,
        "allowed_token_ids": [3], "bad_words": ["é"], "bad_word_ids": [[3, 4]],
        "prompt_logprobs": 2, "truncate_prompt_tokens": 6,
    }
    # fmt: on
    return limits.get(name, value)


def build(cls: type[Any], size: int) -> list[Any]:
    """One instance for each way in which a single field can vary, the first with all fields set."""
    kind = inspect.type_info(cls)
    assert isinstance(kind, inspect.StructType)
    values = {field.name: sample(field.type, size) for field in kind.fields}
    if cls is messages.SamplingParams:
        values = {name: [in_range(name, options[0])] for name, options in values.items()}
    first = {name: options[0] for name, options in values.items()}
    built = [cls(**first)]
    for name, options in values.items():
        built += [cls(**{**first, name: option}) for option in options[1:]]
    return built


@pytest.mark.parametrize(("union", "cls"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_every_message_round_trips(union: str, cls: type[Any]) -> None:
    encode, decode = messages.encoder().encode, messages.decoder(UNIONS[union]).decode
    instances = [message for size in (1, 3) for message in build(cls, size)]
    assert len(instances) >= 2
    for message in instances:
        back = decode(encode(message))
        assert type(back) is cls
        assert back == message


@pytest.mark.parametrize(("union", "cls"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_messages_are_positional_and_tagged(union: str, cls: type[Any]) -> None:
    """Columns by position keep messages small; the tag tells members of a union apart."""
    raw = msgspec.msgpack.decode(messages.encoder().encode(build(cls, 1)[0]))
    assert isinstance(raw, list)
    assert raw[0] == cls.__name__
    assert len(raw) == 1 + len(msgspec.structs.fields(cls))


def test_every_message_of_the_module_travels_on_a_socket() -> None:
    """A struct nobody can send is dead; nested ones are reached through their parents."""
    reached: set[type] = set()

    def visit(kind: inspect.Type) -> None:
        if isinstance(kind, inspect.StructType):
            if kind.cls in reached:
                return
            reached.add(kind.cls)
            children: list[inspect.Type] = [field.type for field in kind.fields]
        elif isinstance(kind, inspect.UnionType):
            children = list(kind.types)
        elif isinstance(kind, inspect.TupleType):
            children = list(kind.item_types)
        elif isinstance(kind, inspect.ListType):
            children = [kind.item_type]
        else:
            return
        for child in children:
            visit(child)

    for union in UNIONS.values():
        visit(inspect.type_info(union))
    declared = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, messages.Message)
    }
    assert declared - {messages.Message} <= reached


def test_enums_have_stable_numbers() -> None:
    """Numbers, not names, travel: a change of order would be a silent change of meaning."""
    numbers = {
        cls.__name__: {member.name: member.value for member in cls}
        for cls in vars(messages).values()
        if isinstance(cls, type) and issubclass(cls, enum.IntEnum) and cls is not enum.IntEnum
    }
    assert numbers["FinishReason"] == {"STOP": 0, "LENGTH": 1, "ABORT": 2, "ERROR": 3}
    assert numbers["AbortReason"] == {"CLIENT": 0, "STOP_STRING": 1, "TIMEOUT": 2}
    assert numbers["Phase"] == {"LOADING": 0, "SIZING": 1, "CAPTURING": 2, "SERVING": 3}
