"""Constraints of a request, made ready for the engine: grammars checked, bad words as tokens."""

import msgspec

from engine.api.grammar import GrammarError
from engine.api.messages import EngineLimits, TokenPieces
from engine.api.sampling import SamplingParams, StructuredOutput
from tokenizer_proc.errors import PromptError
from tokenizer_proc.grammar_check import GrammarChecker
from tokenizer_proc.vocabulary import Vocabulary, VocabularyKind


class Constraints:
    """Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, limits: EngineLimits) -> None:
        self.vocabulary = vocabulary
        pieces = vocabulary.everything.pieces[: limits.vocab_size]
        special_ids = sorted(i for i in vocabulary.special_ids if i < len(pieces))
        self.pieces = TokenPieces(pieces=pieces, special_ids=special_ids)
        self.eos_token_ids = limits.eos_token_ids
        self.checker = GrammarChecker(pieces, special_ids, limits.eos_token_ids)

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Parameters as the engine wants them. Raises PromptError naming the field."""
        if params.structured is not None:
            self._check_grammar(params.structured)
            params = msgspec.structs.replace(params, structured=anonymous(params.structured))
        if params.bad_words:
            ids = [spelling for word in params.bad_words for spelling in self.spellings(word)]
            params = msgspec.structs.replace(params, bad_word_ids=ids)
        self._check_something_is_left(params)
        return params

    def is_known(self, structured: StructuredOutput) -> bool:
        """Whether `resolve` need not compile it."""
        return self.checker.knows(anonymous(structured))

    def spellings(self, word: str) -> list[list[int]]:
        """How a text is usually written in tokens, at the start of a text or word, and inside one."""
        backend, found = self.vocabulary.backend, []
        for text in [word] if word.startswith(" ") else [word, " " + word]:
            for before in ("", "\n"):  # some tokenizers put a space in front of all texts
                ids = backend.encode(before + text, add_special_tokens=False).ids
                spelling = self._ending(ids, text.encode(errors="replace"))
                if spelling and spelling not in found:
                    found.append(spelling)
        if not found:
            raise PromptError(
                400,
                "invalid_value",
                f"bad_words has {word!r:.80}, which this model's tokens cannot spell",
                "bad_words",
            )
        return found

    def _ending(self, ids: list[int], text: bytes) -> list[int]:
        """The last of the ids, as many as spell `text`; [] if none do."""
        pieces, spelt = self.vocabulary.everything.pieces, b""
        for place in range(len(ids) - 1, -1, -1):
            spelt = pieces[ids[place]] + spelt
            if spelt == text:
                return ids[place:]
        return []

    def _check_grammar(self, structured: StructuredOutput) -> None:
        if self.vocabulary.kind is VocabularyKind.OTHER:
            raise PromptError(
                400,
                "unsupported_value",
                f"{structured.param} needs a model whose tokens have bytes of their own (byte-level "
                f"BPE, or SentencePiece with byte fallback); this model's have not",
                structured.param,
            )
        try:
            self.checker.check(anonymous(structured))
        except GrammarError as error:
            raise PromptError(
                400,
                "invalid_schema",
                f"{structured.param} cannot be used as {NAME_OF_KIND[structured.kind]}: {error}",
                structured.param,
            ) from None

    def _check_something_is_left(self, params: SamplingParams) -> None:
        """Of the tokens allowed, for the first one."""
        if params.allowed_token_ids is None:
            return
        left = set(params.allowed_token_ids)
        left.difference_update(ids[0] for ids in params.bad_word_ids if len(ids) == 1)
        if params.min_tokens > 0:
            left.difference_update(params.stop_token_ids)
            if not params.ignore_eos:
                left.difference_update(self.eos_token_ids)
        if not left:
            raise PromptError(
                400,
                "invalid_value",
                "allowed_token_ids has only tokens that bad_words or min_tokens forbid; no token "
                "could be generated",
                "allowed_token_ids",
            )


def anonymous(structured: StructuredOutput) -> StructuredOutput:
    """Without the field's name: the same grammar is compiled once, whoever asks for it."""
    return StructuredOutput(structured.kind, structured.value)


NAME_OF_KIND = {
    "json": "a JSON schema",
    "regex": "a regular expression",
    "choice": "a list of choices",
    "grammar": "a grammar",
}
