"""python -m tokenizer_proc.grammar_worker: compiles grammars to see whether it survives.

The first question is the vocabulary, each other one a grammar (tokenizer_proc/grammar_check.py).
"""

import os
import sys
import threading
from typing import Any

import msgspec
from llguidance import LLTokenizer

from engine.api.grammar import STACK_BYTES, GrammarError, compile_grammar, make_tokenizer
from engine.api.sampling import StructuredOutput
from tokenizer_proc.grammar_check import MEMORY_BYTES, CheckerVocabulary
from tokenizer_proc.limited_process import answer_questions


class GrammarCompiler:
    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None

    def answer(self, question: Any) -> str:
        """What is wrong with it; "" if nothing is."""
        if self._tokenizer is None:
            vocabulary = msgspec.convert(question, CheckerVocabulary)
            self._tokenizer = make_tokenizer(
                vocabulary.pieces, vocabulary.special_ids, vocabulary.eos_ids
            )
            return ""
        try:
            compile_grammar(self._tokenizer, msgspec.convert(question, StructuredOutput))
        except GrammarError as error:
            return str(error)
        return ""


def main() -> None:
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno()
    )  # panics of a compiler are no news
    threading.stack_size(STACK_BYTES)
    compiler = GrammarCompiler()
    # The main thread's stack is of usual size.
    thread = threading.Thread(target=answer_questions, args=(compiler.answer, MEMORY_BYTES))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
