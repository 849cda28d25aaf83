"""Grammars by what asked for them, compiled in threads of their own and kept for the next request.

A request with a grammar starts only when `is_ready` says so: the step loop never waits for a compiler.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer

from engine.api.grammar import STACK_BYTES, GrammarError, compile_grammar, make_tokenizer
from engine.api.sampling import StructuredOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

COMPILING_THREADS = 2
MOST_KEPT = 256


class Grammars:
    """Used by the step loop's thread alone; the threads behind it share nothing else."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="grammar")
        self.tokenizer: Future[LLTokenizer] | None = None
        self.compiled: OrderedDict[StructuredOutput, Future[LLMatcher]] = OrderedDict()

    def learn(
        self, pieces: Sequence[bytes], special_ids: Sequence[int], eos_ids: Sequence[int]
    ) -> None:
        """The tokens' bytes, without which no grammar can be followed."""
        self.tokenizer = self._submit(lambda: make_tokenizer(pieces, special_ids, eos_ids))
        self.compiled.clear()

    def start(self, structured: StructuredOutput) -> None:
        """Begin to compile, unless that is done."""
        if structured in self.compiled:
            self.compiled.move_to_end(structured)
            return
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RuntimeError("a grammar came before the vocabulary")
        self.compiled[structured] = self._submit(
            lambda: compile_grammar(tokenizer.result(), structured)
        )
        while len(self.compiled) > MOST_KEPT:
            self.compiled.popitem(last=False)

    def is_ready(self, structured: StructuredOutput) -> bool:
        self.start(structured)  # it may have been forgotten meanwhile
        return self.compiled[structured].done()

    def wait(self, structured: StructuredOutput, seconds: float) -> None:
        """Until it is ready, or so long."""
        self.start(structured)
        wait([self.compiled[structured]], seconds)

    def error(self, structured: StructuredOutput) -> BaseException | None:
        """Why a grammar that is ready cannot be used: a GrammarError unless the fault is ours."""
        error = self.compiled[structured].exception()
        if error is not None and not isinstance(error, GrammarError):
            logger.error("a grammar could not be compiled: %r", error)
            del self.compiled[structured]  # it may be well next time
        return error

    def matcher(self, structured: StructuredOutput) -> LLMatcher:
        """A new matcher before the first token. Raises GrammarError."""
        self.start(structured)
        return self.compiled[structured].result().deep_copy()

    def _submit(self, work: Callable[[], T]) -> "Future[T]":
        """Run `work` in a thread with a stack for deep grammars; the pool makes threads as needed."""
        before = threading.stack_size(STACK_BYTES)
        try:
            return self.pool.submit(work)
        finally:
            threading.stack_size(before)
