"""What a chat request may ask for here, as settings and the model's template have it."""

from dataclasses import dataclass

from server.answer.call_format import FORMATS, CallFormat, detect
from server.answer.reasoning import REASONING_FORMATS, ReasoningFormat
from server.config import ServerConfig


@dataclass(frozen=True)
class ChatRules:
    calls: CallFormat | None = None  # None: nobody knows how this model writes calls
    reasoning: ReasoningFormat | None = None  # None: reasoning is not split off
    trusts_templates: bool = False  # those that requests bring
    template: str = ""  # the server's; "" if there is none


def chat_rules(config: ServerConfig, template: str) -> ChatRules:
    if config.tool_call_parser == "auto":
        calls = detect(template)
    else:
        calls = FORMATS.get(config.tool_call_parser)
    return ChatRules(
        calls,
        REASONING_FORMATS.get(config.reasoning_parser),
        config.trust_request_chat_template,
        template,
    )
