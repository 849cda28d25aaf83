"""What the fields of structured output become, and which mistakes are told at once."""

import json
from typing import Any

import pytest

from engine.api.sampling import StructuredOutput
from server.errors import ApiError
from server.schema.completions import parse_completion
from server.schema.sampling import SamplingDefaults

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def parsed(**fields: Any) -> StructuredOutput | None:
    return parse_completion({"prompt": "x", **fields}, SamplingDefaults()).common.params.structured


@pytest.mark.parametrize(
    ("fields", "kind", "value", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json", "{}", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            *("json", TEXT, "response_format.json_schema.schema"),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json", TEXT, "structured_outputs.json"),
        (
            {"structured_outputs": {"regex": "a+", "choice": None}},
            *("regex", "a+", "structured_outputs.regex"),
        ),
        ({"guided_json": SCHEMA}, "json", TEXT, "guided_json"),
        ({"guided_json": "{'"}, "json", "{'", "guided_json"),
        ({"guided_regex": "a+", "guided_decoding_backend": "auto"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["é", '"']}, "choice", '["é","\\""]', "guided_choice"),
        ({"guided_grammar": "start: a"}, "grammar", "start: a", "guided_grammar"),
        (
            {"guided_json": {}, "guided_whitespace_pattern": " "},
            *("json", '{"type":"object","x-guidance":{"whitespace_pattern":" "}}', "guided_json"),
        ),
    ],
)
def test_forms(fields: dict[str, Any], kind: Any, value: str, param: str) -> None:
    assert parsed(**fields) == StructuredOutput(kind, value, param)


def test_text_is_the_form_of_no_form() -> None:
    assert parsed(response_format={"type": "text"}) is None
    assert parsed(response_format=None, guided_json=None) is None
    assert parsed(response_format={"type": "text"}, guided_regex="a") is not None


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {}}, "response_format.type", "missing_field"),
        ({"response_format": "json_object"}, "response_format", "invalid_type"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value"),
        (
            {"response_format": {"type": "json_schema"}},
            *("response_format.json_schema", "missing_field"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            *("response_format.json_schema.schema", "missing_field"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            *("response_format.json_schema.schema", "invalid_type"),
        ),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            *("structured_outputs", "invalid_value"),
        ),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            *("structured_outputs.structural_tag", "unsupported_value"),
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]", "invalid_type"),
        ({"guided_json": 3}, "guided_json", "invalid_type"),
        ({"guided_grammar": {"a": 1}}, "guided_grammar", "invalid_type"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            *("guided_regex", "invalid_value"),
        ),
        (
            {"guided_regex": "a", "guided_whitespace_pattern": " "},
            *("guided_whitespace_pattern", "invalid_value"),
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "invalid_value"),
    ],
)
def test_mistakes(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(**fields)
    assert (caught.value.param, caught.value.code) == (param, code)
