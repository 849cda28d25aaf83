"""Chat messages to one prompt text, through the model's own Jinja template (in a sandbox)."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateSyntaxError

from engine.api.messages import ChatPrompt
from tokenizer_proc.errors import PromptError, TokenizerLoadError
from tokenizer_proc.loading import Tokenizer, one_line

PROBE = "sluice probe"
PROBE_SECONDS = 10.0

# Arguments of apply_chat_template, and of what it calls, other than what the template itself reads.
RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)

Messages = list[dict[str, Any]]


class ChatRenderer:
    """Applies the chat template, after bringing messages into the form that the template expects."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Tries the template. Raises TokenizerLoadError if it is no template or does not end."""
        self.tokenizer = tokenizer
        self.has_template = bool(tokenizer.chat_template)
        self.knows_developer = "developer" in str(tokenizer.chat_template)
        with time_limit(PROBE_SECONDS):
            self.takes_strings = self.has_template and self._renders(PROBE)
            self.takes_parts = self.has_template and self._renders(
                [{"type": "text", "text": PROBE}]
            )

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt text. Raises PromptError with the template's own words."""
        if not self.has_template:
            raise PromptError(
                400,
                "invalid_messages",
                "this model has no chat template; start the server with --chat-template FILE, or "
                "use /v1/completions",
                "messages",
            )
        reserved = sorted(RESERVED_KWARGS.intersection(prompt.chat_template_kwargs))
        if reserved:
            raise PromptError(
                400,
                "invalid_value",
                f"chat_template_kwargs cannot set {', '.join(reserved)}; it is for variables that "
                f"the template itself reads",
                "chat_template_kwargs",
            )
        try:
            return self._apply(
                [self._adapted(message) for message in prompt.messages],
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                **prompt.chat_template_kwargs,
            )
        except Exception as error:  # a template can raise anything: its code is data of the model
            raise PromptError(
                400,
                "invalid_messages",
                f"the chat template refused these messages: {one_line(error)}",
                "messages",
            ) from error

    def _apply(self, messages: Messages, **variables: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **variables)

    def _renders(self, content: str | list[dict[str, str]]) -> bool:
        """Does a message with this content come out as its text, and not as a printed list?"""
        try:
            text = self._apply([{"role": "user", "content": content}], add_generation_prompt=True)
        except TokenizerLoadError:
            raise
        except TemplateSyntaxError as error:
            raise TokenizerLoadError(
                f"the chat template has an error in line {error.lineno}: {one_line(error)}; correct "
                f"it, or give another with --chat-template FILE"
            ) from error
        except Exception:
            return False
        return PROBE in text and "'type'" not in text and '"type"' not in text

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        if message.get("role") == "developer" and not self.knows_developer:
            message["role"] = "system"
        if message.get("content") is None and not message.get("tool_calls"):
            message["content"] = ""
        message["content"] = self._adapted_content(message.get("content"))
        return message

    def _adapted_content(self, content: str | list[dict[str, Any]] | None) -> Any:
        if isinstance(content, list) and not self.takes_parts:
            return "".join(part.get("text", "") for part in content)
        if isinstance(content, list):
            return [{"type": "text", "text": part.get("text", "")} for part in content]
        if isinstance(content, str) and not self.takes_strings and self.takes_parts:
            return [{"type": "text", "text": content}]
        return content


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TokenizerLoadError in the block after so long. Only in a main thread, which signals need."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: Any) -> None:
        raise TokenizerLoadError(
            f"the chat template takes more than {seconds:g} s for one short message; give another "
            f"with --chat-template FILE"
        )

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
