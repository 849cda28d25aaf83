"""Renders chat templates with a limit of time, in processes of their own (template_worker.py)."""

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tokenizer_proc.loading import one_line
from tokenizer_proc.template_worker import READY, receive, send

START_SECONDS = 60.0  # a busy machine may take long to start a process
ROOT = Path(__file__).resolve().parent.parent


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
        self._idle: list[Worker] = []

    def render(self, template: str, variables: dict[str, Any], seconds: float) -> str:
        """The text. Raises TemplateError, TemplateSyntax or TemplateTimeout."""
        for is_last in (False, True):
            worker = self._idle.pop() if self._idle else Worker()
            try:
                answer = worker.ask([template, variables, seconds], seconds)
            except TimeoutError:
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


class Worker:
    """One process. It ends when this one does, as it then reads the end of its input."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tokenizer_proc.template_worker"],
                stdin=theirs.fileno(),
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C is not for it
            )
        self._socket.settimeout(START_SECONDS)
        try:
            if receive(self._socket) != READY:
                raise EOFError
        except BaseException:
            self.kill()
            raise

    def ask(self, message: Any, seconds: float) -> list[Any]:
        """Raises TimeoutError; EOFError or ConnectionError if the process has ended."""
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        send(self._socket, message)
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        answer: list[Any] = receive(self._socket)
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()
