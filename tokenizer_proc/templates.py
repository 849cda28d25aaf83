"""Renders chat templates with a limit of time, in processes of their own (template_worker.py)."""

from typing import Any

from tokenizer_proc.limited_process import LimitedProcess, OverTime
from tokenizer_proc.loading import one_line

WORKER = "tokenizer_proc.template_worker"


class TemplateError(Exception):
    """The template refused its input, in its own words, or failed."""


class TemplateSyntax(TemplateError):
    """It is no template."""


class TemplateTimeout(TemplateError):
    """It did not end in time."""


class TemplateRenderer:
    """Safe to use from several threads: each uses a process of its own, which is started when needed.

    A rendering costs about 0.1 ms more than it would here, and it does not hold up other threads.
    """

    def __init__(self) -> None:
        self._idle: list[LimitedProcess] = []

    def render(self, template: str, variables: dict[str, Any], seconds: float) -> str:
        """The text. Raises TemplateError, TemplateSyntax or TemplateTimeout."""
        for is_last in (False, True):
            worker = self._take()
            try:
                answer = worker.ask([template, variables], seconds)
            except OverTime:
                worker.kill()
                raise TemplateTimeout(f"it takes more than {seconds:g} s") from None
            except (EOFError, ConnectionError):
                # An idle one may have been killed for memory, which says nothing of this template.
                worker.kill()
                if is_last:
                    raise TemplateError("it ended the process that ran it") from None
                continue
            except BaseException:
                worker.kill()
                raise
            self._idle.append(worker)
            return text_of(answer)
        raise AssertionError("the second attempt returns or raises")

    def _take(self) -> LimitedProcess:
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                return LimitedProcess(WORKER)
            if not worker.has_ended:
                return worker
            worker.kill()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().kill()


def text_of(answer: list[Any]) -> str:
    match answer:
        case ["text", str(text)]:
            return text
        case ["syntax", line, why]:
            raise TemplateSyntax(f"line {line}: {one_line(why)}")
    raise TemplateError(one_line(answer[1]))
