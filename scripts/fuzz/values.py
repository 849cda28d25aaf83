"""Values of a JSON schema: those it takes, with a liking for its bounds, and those it nearly takes."""

import random
from typing import Any

Schema = dict[str, Any]

TEXTS = [
    "", "a", "Hello world", "Straße é", "日本語のテキスト", "😀👩‍👩‍👧🇩🇪", "\x00\x01\x7f", "\u2028\ufeff\ufffd",
    "line\nline\r\n\ttab", "{{ messages }}{% for x in y %}", "<|im_end|>", "<tool_call>{", "a" * 255,
    "a" * 300, "../../etc/passwd", "(", "[a-z]{2,4}", '{"type": "object"}', "start: /a/", "1", "null",
]  # fmt: skip
ODD = [
    None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, -1e308, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1,
    10**30, "", "x", "5", [], {}, [[]], [None], {"": None}, [1, "a"], {"type": "text"}, {"a": {"b": []}},
]  # fmt: skip
MAX_ITEMS = 3  # of a list, but for one in a hundred


def right(schema: Schema, rng: random.Random) -> Any:
    """A value that `schema` takes."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema and "type" not in schema:
        return right(rng.choice(schema["anyOf"]), rng)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    match kind:
        case "null":
            return None
        case "boolean":
            return rng.random() < 0.5
        case "integer" | "number":
            return number(schema, kind, rng)
        case "string":
            return text(schema, rng)
        case "array":
            low, high = schema.get("minItems", 0), schema.get("maxItems", 2000)
            few = rng.random() < 0.99
            size = rng.randint(low, max(low, min(high, MAX_ITEMS))) if few else min(high, 40)
            return [right(schema.get("items", {}), rng) for _ in range(size)]
        case "object":
            return members(schema, rng)
    return rng.choice(ODD)


def number(schema: Schema, kind: str, rng: random.Random) -> int | float:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -1e6))
    high = schema.get("maximum", max(low, 1) * 1e3)
    inside = rng.uniform(low, min(high, low + 300))
    value = rng.choice([low, high, *[inside] * 10])
    if "exclusiveMinimum" in schema and value == low:
        value = min(high, low + 0.5)
    if kind == "integer":
        value = int(value)
    return 1 if schema.get("not") == {"const": value} else value


def text(schema: Schema, rng: random.Random) -> str:
    low, high = schema.get("minLength", 0), schema.get("maxLength", 10**9)
    if "pattern" in schema:  # names of functions, and token ids
        return rng.choice(["5", "7", "12", "300"])
    value = rng.choice(TEXTS)
    if rng.random() < 0.02:
        value *= 200
    return value[:high] if len(value) >= low else value + "x" * (low - len(value))


def members(schema: Schema, rng: random.Random) -> dict[str, Any]:
    properties: dict[str, Schema] = schema.get("properties", {})
    required = schema.get("required", [])
    optional = [name for name in properties if name not in required]
    chosen = rng.sample(optional, min(len(optional), rng.choice([0, 0, 1, 1, 2, 3, 6])))
    one = rng.choice(schema.get("oneOf") or schema.get("anyOf") or [{}])
    for name in one.get("required", []):
        narrow = one.get("properties", {}).get(name, {})
        narrow = {key: value for key, value in narrow.items() if key not in ("not", "type")}
        properties = properties | {
            name: never_null(properties.get(name, {"type": "string"})) | narrow
        }
    names = dict.fromkeys([*required, *one.get("required", []), *chosen])
    result = {name: right(properties[name], rng) for name in names}
    more = schema.get("additionalProperties")
    if isinstance(more, dict):
        names = schema.get("propertyNames", {})
        for _ in range(rng.randint(0, MAX_ITEMS)):
            result[text(names, rng)] = right(more, rng)
    return result


def never_null(schema: Schema) -> Schema:
    if isinstance(schema.get("type"), list):
        return {**schema, "type": [kind for kind in schema["type"] if kind != "null"]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [one for one in schema["anyOf"] if one != {"type": "null"}]}
    return schema


def near(value: Any, rng: random.Random) -> Any:
    """`value` with one place changed, which makes it wrong more often than not."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(6):
            case 0:
                del changed[name]
            case 1:
                changed[name] = rng.choice(ODD)
            case 2:
                changed[rng.choice(TEXTS)] = rng.choice(ODD)
            case 3:
                changed[name] = [changed[name]]
            case _:
                changed[name] = near(changed[name], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        match rng.randrange(4):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return value * rng.choice([2, 10])
            case _:
                return [*value[:place], near(value[place], rng), *value[place + 1 :]]
    if isinstance(value, bool):
        return rng.choice([int(value), str(value), None])
    if isinstance(value, int | float) and rng.random() < 0.7:
        return rng.choice([value + 1, value - 1, -value, value * 1000, str(value), float(value)])
    if isinstance(value, str) and rng.random() < 0.7:
        return rng.choice([value * 3, [value], value[1:], *TEXTS])
    return rng.choice(ODD)
