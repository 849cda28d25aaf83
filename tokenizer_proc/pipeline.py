"""A request's text on both sides of the engine: to tokens in front of it, to text behind it.

    Generate ──prepare──► PreparedRequest ──submit──► messages for the engine
                                           StepOutput ──output.process──► Deltas

No sockets and no threads: the tokenizer process, the offline `LLM` and batches run it in their own ways.
"""

from collections.abc import Container
from dataclasses import replace

from engine.api.messages import (
    Accepted,
    AddRequest,
    EngineLimits,
    Generate,
    RequestError,
    TokenPieces,
)
from tokenizer_proc.constraints import Constraints
from tokenizer_proc.encode import Encoder
from tokenizer_proc.errors import PromptError
from tokenizer_proc.output import OutputProcessor
from tokenizer_proc.prepare import PreparedRequest, prepare
from tokenizer_proc.prompt_tokens import token_texts
from tokenizer_proc.vocabulary import Vocabulary


class TextPipeline:
    """Owns the text state of all requests of one engine."""

    def __init__(
        self, encoder: Encoder, vocabulary: Vocabulary, limits: EngineLimits, default_seed: int = 0
    ) -> None:
        vocabulary.pad_to(limits.vocab_size)
        self.encoder = encoder
        self.vocabulary = vocabulary
        self.limits = limits
        self.default_seed = default_seed
        self.constraints = Constraints(vocabulary, limits)
        self.output = OutputProcessor(vocabulary)
        self._engine_has_pieces = False

    def may_be_slow(self, generate: Generate) -> bool:
        """Whether `prepare` has a grammar to compile."""
        forms = (generate.params.structured, generate.structured_after_mark)
        return any(form is not None and not self.constraints.is_known(form) for form in forms)

    def prepare(self, generate: Generate) -> PreparedRequest:
        """Encode and check it. Safe to use from several threads. Raises PromptError.

        For an echo with log-probabilities the text is that of the tokens: another one than was sent
        only if the tokenizer normalizes what it reads.
        """
        result = prepare(self.encoder, generate, self.limits, self.default_seed, self.constraints)
        if generate.want_prompt_text and generate.params.prompt_logprobs is not None:
            texts = token_texts(self.vocabulary, result.token_ids, result.added)
            result = replace(result, prompt_text="".join(texts), token_texts=texts)
        return result

    def submit(
        self, generate: Generate, prepared: PreparedRequest, wanted: Container[int]
    ) -> list[TokenPieces | AddRequest]:
        """What to send to the engine for the choices in `wanted`, whose output is expected from now on."""
        messages: list[TokenPieces | AddRequest] = []
        form = generate.params.structured or generate.structured_after_mark
        for request in prepared.requests:
            if request.req_id not in wanted:
                continue
            self.output.add(
                request,
                prepared.copies,
                generate.want_token_ids,
                prepared.token_texts,
                generate.shown_special,
                form_param=form.param if form is not None else "",
            )
            if request.params.structured is not None and not self._engine_has_pieces:
                messages.append(self.constraints.pieces)
                self._engine_has_pieces = True
            messages.append(request)
        return messages

    def close(self) -> None:
        """End the processes that render templates and check grammars."""
        self.encoder.chat.close()
        self.constraints.checker.close()


def choice_ids(generate: Generate) -> range:
    return range(generate.req_id, generate.req_id + generate.params.n)


def accepted(generate: Generate, prepared: PreparedRequest) -> Accepted:
    return Accepted(
        req_id=generate.req_id,
        num_prompt_tokens=prepared.num_prompt_tokens,
        prompt_text=prepared.prompt_text,
        prompt_token_ids=prepared.token_ids.tobytes() if generate.want_token_ids else None,
        prompt_end=prepared.prompt_end,
    )


def refused(generate: Generate, error: PromptError) -> RequestError:
    return RequestError(
        req_id=generate.req_id,
        n=generate.params.n,
        status=error.status,
        code=error.code,
        message=error.message,
        param=error.param,
    )
