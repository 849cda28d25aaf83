"""The process that compiles grammars to see whether it survives: see grammar_check.py."""

import os
import resource
import sys
import threading

import msgspec

from engine.api.grammar import STACK_BYTES, GrammarError, compile_grammar, make_tokenizer
from engine.api.process import die_with_parent
from engine.api.sampling import StructuredOutput
from tokenizer_proc.grammar_check import (
    LENGTH,
    MEMORY_BYTES,
    CheckerVocabulary,
    write_frame,
)


def read_frame() -> bytes:
    """b"" at the end."""
    head = sys.stdin.buffer.read(LENGTH.size)
    return sys.stdin.buffer.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def serve() -> None:
    vocabulary = msgspec.msgpack.decode(read_frame(), type=CheckerVocabulary)
    tokenizer = make_tokenizer(vocabulary.pieces, vocabulary.special_ids, vocabulary.eos_ids)
    answer = ""
    while True:
        write_frame(sys.stdout.buffer, answer)
        frame = read_frame()
        if not frame:
            return
        try:
            compile_grammar(tokenizer, msgspec.msgpack.decode(frame, type=StructuredOutput))
            answer = ""
        except GrammarError as error:
            answer = str(error)


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)  # the main thread's stack is of usual size
    thread.start()
    thread.join()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
