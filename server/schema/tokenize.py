"""POST /tokenize and /detokenize: the bodies."""

from dataclasses import dataclass
from typing import Any

from engine.api.messages import Prompt, TextPrompt
from server.errors import invalid_type, invalid_value, missing
from server.schema.chat import TEMPLATE_FIELDS, build_chat_prompt
from server.schema.chat_rules import ChatRules
from server.schema.completions import TOKEN_IDS, TokenIds, token_ids
from server.schema.fields import Table, boolean, decode, string, takes
from server.schema.tools import chosen_tools


@takes(TOKEN_IDS)
def token_list(value: Any, path: str) -> TokenIds:
    if not isinstance(value, list):
        raise invalid_type(path, "a list of token ids", value)
    return token_ids(value, path)


TOKENIZE_FIELDS: Table = {
    **TEMPLATE_FIELDS,
    "model": string,
    "prompt": string,
    "return_token_strs": boolean.or_else(False),
}
# One of both.
ONE_PROMPT = [
    {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
    for name in ("prompt", "messages")
]
DETOKENIZE_FIELDS: Table = {"model": string, "tokens": token_list.required()}


@dataclass(frozen=True)
class TokenizeRequest:
    model: str | None
    prompt: Prompt
    return_token_strs: bool
    ignored: list[str]


@dataclass(frozen=True)
class DetokenizeRequest:
    model: str | None
    tokens: TokenIds
    ignored: list[str]


def parse_tokenize(body: dict[str, Any], rules: ChatRules) -> TokenizeRequest:
    values, ignored = decode(body, TOKENIZE_FIELDS)
    text, messages = values.get("prompt"), values.get("messages")
    if text is not None and messages is not None:
        raise invalid_value("messages", "give either prompt or messages, not both")
    if text is None and messages is None:
        raise missing("prompt", "prompt (or messages) is required")
    prompt: Prompt
    if text is not None:
        prompt = TextPrompt(text=text, add_special_tokens=values.get("add_special_tokens", True))
    else:
        prompt = build_chat_prompt(values, chosen_tools(values), rules)
    return TokenizeRequest(
        model=values.get("model"),
        prompt=prompt,
        return_token_strs=values["return_token_strs"],
        ignored=ignored,
    )


def parse_detokenize(body: dict[str, Any]) -> DetokenizeRequest:
    values, ignored = decode(body, DETOKENIZE_FIELDS)
    return DetokenizeRequest(model=values.get("model"), tokens=values["tokens"], ignored=ignored)
