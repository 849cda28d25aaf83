"""Fields that say what the text has to look like -> StructuredOutput.

One of them at most. What they hold is compiled by tokenizer_proc, which answers with the same names.
"""

from typing import Any

import orjson

from engine.api.sampling import StructuredOutput
from server.errors import invalid_type, invalid_value, missing, unsupported
from server.schema.fields import (
    Table,
    any_of,
    boolean,
    decode,
    json_object,
    list_of,
    object_with,
    only,
    schema_of,
    string,
    takes,
)

ANY_OBJECT = "{}"


@takes(any_of({"type": "object"}, {"type": "string"}))
def json_schema(value: Any, path: str) -> StructuredOutput:
    """A schema as an object, or as JSON text."""
    if isinstance(value, dict):
        return StructuredOutput("json", orjson.dumps(value).decode(), path)
    if isinstance(value, str):
        return StructuredOutput("json", value, path)
    raise invalid_type(path, "a JSON schema: an object, or its JSON text", value)


@takes(string.schema)
def regex(value: Any, path: str) -> StructuredOutput:
    return StructuredOutput("regex", string(value, path), path)


@takes(list_of(string).schema | {"minItems": 1})
def choice(value: Any, path: str) -> StructuredOutput:
    choices = list_of(string)(value, path)
    if not choices:
        raise invalid_value(path, f"{path} is empty; give at least one text to choose")
    return StructuredOutput("choice", orjson.dumps(choices).decode(), path)


@takes(string.schema)
def grammar(value: Any, path: str) -> StructuredOutput:
    return StructuredOutput("grammar", string(value, path), path)


@takes(boolean.schema)
def any_json_object(value: Any, path: str) -> StructuredOutput | None:
    return StructuredOutput("json", ANY_OBJECT, path) if boolean(value, path) else None


@takes(
    any_of(
        object_with({"type": {"enum": ["text", "json_object"]}}),
        object_with(
            {
                "type": {"const": "json_schema"},
                "json_schema": object_with({"schema": {"type": "object"}}),
            }
        ),
    )
)
def response_format(value: Any, path: str) -> StructuredOutput | None:
    form = json_object(value, path)
    kind = form.get("type")
    if kind is None:
        raise missing(f"{path}.type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput("json", ANY_OBJECT, path)
    if kind != "json_schema":
        raise unsupported(
            f"{path}.type",
            f"{path}.type must be text, json_object or json_schema, got {kind!r:.80}",
        )
    where = f"{path}.json_schema"
    if form.get("json_schema") is None:
        raise missing(where)
    schema = json_object(form["json_schema"], where).get("schema")
    if schema is None:
        raise missing(f"{where}.schema")
    return json_schema(json_object(schema, f"{where}.schema"), f"{where}.schema")


# The kinds, within structured_outputs and as fields of their own.
KINDS: Table = {
    "json": json_schema,
    "regex": regex,
    "choice": choice,
    "grammar": grammar,
}


STRUCTURED_OUTPUTS: Table = {
    **KINDS,
    "json_object": any_json_object,
    "whitespace_pattern": string,
    "disable_fallback": only(False, True),
    "disable_any_whitespace": only(False),
    "disable_additional_properties": only(False),
}
ALL_KINDS = (*KINDS, "json_object")
ONE_KIND = [
    *({"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in KINDS),
    {"required": ["json_object"], "properties": {"json_object": {"const": True}}},
]


@takes(schema_of(STRUCTURED_OUTPUTS, additionalProperties=False, oneOf=ONE_KIND))
def structured_outputs(value: Any, path: str) -> StructuredOutput:
    values, unknown = decode(json_object(value, path), STRUCTURED_OUTPUTS, prefix=f"{path}.")
    if unknown:
        name = unknown[0]
        raise unsupported(
            f"{path}.{name[:80]}",
            f"{path}.{name:.80} is not supported; give exactly one of {', '.join(ALL_KINDS)}",
        )
    pattern = values.pop("whitespace_pattern", None)
    given = [form for form in values.values() if isinstance(form, StructuredOutput)]
    if len(given) != 1:
        raise invalid_value(
            path, f"{path} needs exactly one of {', '.join(ALL_KINDS)}, got {len(given)}"
        )
    return with_whitespace(given[0], pattern, f"{path}.whitespace_pattern")


STRUCTURED_FIELDS: Table = {
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    **{f"guided_{name}": validate for name, validate in KINDS.items()},
    "guided_whitespace_pattern": string,
    "guided_decoding_backend": string,  # without effect: there is one
}


def structured_output(values: dict[str, Any]) -> StructuredOutput | None:
    """What the decoded STRUCTURED_FIELDS ask for. Raises ApiError if they contradict each other."""
    given = {
        name: values[name]
        for name in STRUCTURED_FIELDS
        if isinstance(values.get(name), StructuredOutput)
    }
    if len(given) > 1:
        first, second = list(given)[:2]
        raise invalid_value(
            second,
            f"{second} and {first} exclude each other: one form of the text can be asked for",
        )
    pattern = values.get("guided_whitespace_pattern")
    form = next(iter(given.values()), None)
    return with_whitespace(form, pattern, "guided_whitespace_pattern")


def with_whitespace(form: Any, pattern: str | None, path: str) -> Any:
    """`pattern`: a regular expression of the white space allowed between parts of JSON."""
    if pattern is None:
        return form
    if form is None or form.kind != "json":
        raise invalid_value(path, f"{path} needs a JSON schema beside it")
    try:
        schema = orjson.loads(form.value)
    except orjson.JSONDecodeError:
        return form  # told by whoever compiles it
    if not isinstance(schema, dict):
        return form
    schema = {**(schema or {"type": "object"}), "x-guidance": {"whitespace_pattern": pattern}}
    return StructuredOutput("json", orjson.dumps(schema).decode(), form.param)
