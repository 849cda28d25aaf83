"""Whether a grammar can be compiled, found out in a process that may die of it.

Grammars come from clients. Some take a second to compile, some gigabytes, and some overflow the stack
of whoever compiles them. So another process (grammar_worker.py) does it first, within limits of time and
memory; when it exceeds one, it is replaced, and the client gets an error. Only what passed reaches the
engine.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from engine.api.grammar import GrammarError
from engine.api.sampling import StructuredOutput
from tokenizer_proc.limited_process import LimitedProcess, OverTime

SECONDS = 2.5
VOCABULARY_SECONDS = 30.0  # to take in the vocabulary
MEMORY_BYTES = 1536 * 1024 * 1024  # address space of the process
MOST_REMEMBERED = 1024

TOO_COMPLEX = (
    f"it takes more than {SECONDS:g} seconds or {MEMORY_BYTES // 2**20} MB to compile; make it "
    f"smaller, with fewer repetitions and less nesting"
)


class CheckerVocabulary(msgspec.Struct, array_like=True):
    """The first question."""

    pieces: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]


class GrammarChecker:
    """Owns the process, which starts with the first grammar. Safe to use from several threads."""

    def __init__(
        self, pieces: Sequence[bytes], special_ids: Sequence[int], eos_ids: Sequence[int]
    ) -> None:
        self.vocabulary = CheckerVocabulary(list(pieces), list(special_ids), list(eos_ids))
        self.lock = threading.Lock()
        self.process: LimitedProcess | None = None
        self.known: OrderedDict[StructuredOutput, str] = OrderedDict()  # "" or the error

    def knows(self, structured: StructuredOutput) -> bool:
        """Whether `check` has its answer ready."""
        return structured in self.known

    def check(self, structured: StructuredOutput) -> None:
        """Raises GrammarError unless the grammar compiles.

        Takes up to SECONDS for one that is not known, and such ones wait for each other.
        """
        error = self.known.get(structured)
        if error is None:
            with self.lock:
                error = self._compile(structured)
                if error != TOO_COMPLEX:  # which may be the fault of a busy machine
                    self.known[structured] = error
                while len(self.known) > MOST_REMEMBERED:
                    self.known.popitem(last=False)
        if error:
            raise GrammarError(error)

    def close(self) -> None:
        """End the process, even in the middle of a grammar."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()

    def _compile(self, structured: StructuredOutput) -> str:
        if self.process is not None and self.process.has_ended:
            self.close()  # somebody killed it while it was idle
        process = self.process or self._start()
        try:
            error: str = process.ask(structured, SECONDS)
        except (OverTime, EOFError, OSError) as error:
            self.close()
            if isinstance(error, TimeoutError):  # from the handler of a signal
                raise
            return TOO_COMPLEX
        except BaseException:
            self.close()  # a signal left its answer on the way: the next one would be given it
            raise
        return error

    def _start(self) -> LimitedProcess:
        try:
            self.process = process = LimitedProcess("tokenizer_proc.grammar_worker")
            process.ask(self.vocabulary, VOCABULARY_SECONDS)
        except (OverTime, OSError, EOFError) as error:
            self.close()
            if isinstance(error, TimeoutError):  # from the handler of a signal
                raise
            raise RuntimeError("the process that checks grammars does not start") from error
        except BaseException:  # of a signal
            self.close()
            raise
        return process
