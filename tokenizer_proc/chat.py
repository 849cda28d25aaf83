"""Chat messages to one prompt text, through the model's own Jinja template."""

import re
import secrets
from typing import Any

from engine.api.messages import ChatPrompt
from tokenizer_proc.errors import PromptError, TokenizerLoadError
from tokenizer_proc.loading import Tokenizer
from tokenizer_proc.templates import (
    TemplateError,
    TemplateRenderer,
    TemplateSyntax,
    TemplateTimeout,
)

PROBE = "sluice probe"
OWN_TEMPLATE_SECONDS = 10.0  # the model's, or --chat-template: trusted but for odd messages
REQUEST_TEMPLATE_SECONDS = 2.0  # a template that came with the request

# Variables of templates that have fields of their own.
RESERVED_KWARGS = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages"}
    | {"tokenize", "tools"}
)
TESTS_FOR_NONE = re.compile(r"""content["']?\]?\s+is\s+(not\s+)?none""")
REASONING_NAMES = ("reasoning", "thinking")  # under which templates read it, too

Messages = list[dict[str, Any]]


class ChatTemplate:
    """One template, and the forms in which it wants messages."""

    def __init__(
        self, text: str, special_tokens: dict[str, Any], renderer: TemplateRenderer, seconds: float
    ) -> None:
        """Tries the template. Raises TemplateSyntax or TemplateTimeout if it is none or does not end."""
        self.text = text
        self._special_tokens = special_tokens
        self._renderer = renderer
        self._seconds = seconds
        self.knows_developer = "developer" in text
        self.tests_for_none = TESTS_FOR_NONE.search(text) is not None
        self.takes_strings = self._shows(PROBE)
        self.takes_parts = self._shows([{"type": "text", "text": PROBE}])

    def render(self, messages: Messages, **variables: Any) -> str:
        """Raises TemplateError."""
        adapted = [self.adapted(message) for message in messages]
        return self._render(adapted, **variables)

    def _render(self, messages: Messages, **variables: Any) -> str:
        variables = {**self._special_tokens, **variables, "messages": messages}
        return self._renderer.render(self.text, variables, self._seconds)

    def _shows(self, content: str | list[dict[str, str]]) -> bool:
        """Does a message with this content come out as its text, and not as a printed list?"""
        try:
            text = self._render([{"role": "user", "content": content}], add_generation_prompt=True)
        except (TemplateSyntax, TemplateTimeout):
            raise
        except TemplateError:
            return False
        return PROBE in text and "'type'" not in text and '"type"' not in text

    def adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        if message.get("role") == "developer" and not self.knows_developer:
            message["role"] = "system"
        content = message.get("content")
        if content is None:
            # Beside calls, some templates look for null; others add content to text.
            keeps_none = bool(message.get("tool_calls")) and self.tests_for_none
            message["content"] = None if keeps_none else ""
        else:
            message["content"] = self._adapted_content(content)
        if "reasoning_content" in message:
            for name in REASONING_NAMES:
                message.setdefault(name, message["reasoning_content"])
        return message

    def _adapted_content(self, content: str | list[dict[str, Any]]) -> Any:
        if isinstance(content, list) and not self.takes_parts:
            return "".join(part.get("text", "") for part in content)
        if isinstance(content, list):
            return [{"type": "text", "text": part.get("text", "")} for part in content]
        if not self.takes_strings and self.takes_parts:
            return [{"type": "text", "text": content}]
        return content


class ChatRenderer:
    """Applies chat templates: the model's, or one that comes with a request. Safe in several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Tries the template. Raises TokenizerLoadError if it is no template or does not end."""
        self._renderer = TemplateRenderer()
        self._special_tokens = {
            name: [str(t) for t in token] if isinstance(token, list) else str(token)
            for name, token in tokenizer.special_tokens_map.items()
        }
        self._own: ChatTemplate | None = None
        self._for_tools: ChatTemplate | None = None
        named = templates_of(tokenizer.chat_template)
        try:
            if "default" in named:
                self._own = self._template(named["default"], OWN_TEMPLATE_SECONDS)
            if "tool_use" in named:
                self._for_tools = self._template(named["tool_use"], OWN_TEMPLATE_SECONDS)
        except TemplateSyntax as error:
            raise TokenizerLoadError(
                f"the chat template has an error in {error}; correct it, or give another with "
                "--chat-template FILE"
            ) from error
        except TemplateTimeout as error:
            raise TokenizerLoadError(
                f"the chat template takes more than {OWN_TEMPLATE_SECONDS:g} s for one short message; "
                "give another with --chat-template FILE"
            ) from error

    def close(self) -> None:
        """End the processes that render."""
        self._renderer.close()

    @property
    def template_text(self) -> str:
        """Of the template that shows tools, if there are several; "" if there is none."""
        template = self._for_tools or self._own
        return template.text if template else ""

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt text. Raises PromptError with the template's own words."""
        reserved = sorted(RESERVED_KWARGS.intersection(prompt.chat_template_kwargs))
        if reserved:
            raise PromptError(
                400,
                "invalid_value",
                f"chat_template_kwargs cannot set {', '.join(reserved)}; it is for variables that "
                f"only the template knows, and these are fields of their own",
                "chat_template_kwargs",
            )
        messages, mark = prompt.messages, ""
        if prompt.continue_final_message:
            mark = f"[{secrets.token_hex(16)}]"
            messages = [*messages[:-1], with_mark(messages[-1], mark)]
        try:
            text = self._template_for(prompt).render(
                messages,
                add_generation_prompt=prompt.add_generation_prompt,
                tools=prompt.tools or None,
                documents=prompt.documents or None,
                **prompt.chat_template_kwargs,
            )
        except TemplateError as error:
            raise refusal(error) from error
        except UnicodeEncodeError as error:
            raise PromptError(
                400, "invalid_unicode", "messages have a lone surrogate", "messages"
            ) from error
        return text_before(mark, text) if mark else text

    def _template(self, text: str, seconds: float) -> ChatTemplate:
        return ChatTemplate(text, self._special_tokens, self._renderer, seconds)

    def _template_for(self, prompt: ChatPrompt) -> ChatTemplate:
        if prompt.chat_template:
            return self._request_template(prompt.chat_template)
        template = (self._for_tools if prompt.tools else None) or self._own
        if template is None:
            raise PromptError(
                400,
                "invalid_messages",
                "this model has no chat template; start the server with --chat-template FILE, or "
                "use /v1/completions",
                "messages",
            )
        return template

    def _request_template(self, text: str) -> ChatTemplate:
        try:
            return self._template(text, REQUEST_TEMPLATE_SECONDS)
        except TemplateError as error:
            raise PromptError(
                400,
                "invalid_value",
                f"chat_template cannot be used: {error}",
                "chat_template",
            ) from error


def templates_of(chat_template: Any) -> dict[str, str]:
    """By name. Tokenizers have none, one, or several, of which one may be for requests with tools.

    Raises TokenizerLoadError for what is no text.
    """
    if not chat_template:
        return {}
    named = {"default": chat_template} if isinstance(chat_template, str) else chat_template
    if not (isinstance(named, dict) and all(is_text(text) for text in named.values())):
        raise TokenizerLoadError(
            f"the chat template in the tokenizer's files is no text but {chat_template!a:.80}; correct it, "
            "or give another with --chat-template FILE"
        )
    return {"default": next(iter(named.values())), **named}


def is_text(value: Any) -> bool:
    """As it can be sent to another process: JSON may hold halves of characters."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def refusal(error: TemplateError) -> PromptError:
    return PromptError(
        400, "invalid_messages", f"the chat template refused these messages: {error}", "messages"
    )


def with_mark(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """The message with `mark` at the end of its content."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + mark}
    last = {**content[-1], "text": content[-1].get("text", "") + mark}
    return {**message, "content": [*content[:-1], last]}


def text_before(mark: str, text: str) -> str:
    """What a final message to go on with leaves of the rendered text. Raises PromptError."""
    at = text.rfind(mark)
    if at < 0:
        raise PromptError(
            400,
            "invalid_messages",
            "continue_final_message cannot work: the chat template leaves the last message out",
            "messages",
        )
    return text[:at]
