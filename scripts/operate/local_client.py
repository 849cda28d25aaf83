"""The server's client of the engine, with the engine in this process and no sockets in between.

    EngineClient.generate ──Generate──► prepare ──AddRequest──► StepLoop.take
    RequestStream ◄──Deltas── OutputProcessor ◄──StepOutput── StepLoop.step

Whatever a request means to the server it means here, as the same code reads it and answers it; the parts
that the server spreads over three processes (text to ids, engine, ids to text) are `LLM`'s.
"""

from dataclasses import replace
from typing import Any

from engine.api.config import EngineConfig
from engine.api.messages import (
    Abort,
    AbortReason,
    AbortRequests,
    Accepted,
    Generate,
    RequestError,
    Sockets,
    StepOutput,
    TokenizerReady,
)
from engine.llm import LLM
from server.client import EngineClient
from server.config import ServerConfig
from server.health import EngineStatus
from server.launcher import default_model_name
from server.metrics import Exporter, Metrics
from server.model_check import model_digest, sampling_defaults
from server.service import Service
from tokenizer_proc.errors import PromptError
from tokenizer_proc.prepare import PreparedRequest, prepare
from tokenizer_proc.prompt_tokens import token_texts

NO_SOCKETS = Sockets(ingress="", submit="", tokens="", replies="", state="")


class BatchLLM(LLM):
    """An `LLM` whose steps go to a client's streams rather than into `RequestOutput`s."""

    client: "LocalClient"

    def _receive(self, step: StepOutput) -> None:
        self.client.receive(step)


class LocalClient(EngineClient):
    """Never `start`ed: what the server sends over a socket is done at once, in `_send`."""

    def __init__(self, llm: BatchLLM) -> None:
        super().__init__(NO_SOCKETS, EngineStatus(stall_timeout_s=0.0), Metrics())
        self.llm = llm
        llm.client = self
        self._on_tokenizer_ready(
            TokenizerReady(
                limits=llm.limits,
                has_chat_template=llm.encoder.has_chat_template,
                chat_template=llm.encoder.chat.template_text,
            )
        )

    def step(self) -> None:
        """One step of the engine, if it has anything to do."""
        if self.llm.engine.loop.has_work():
            self.llm.engine.loop.step()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self, step: StepOutput) -> None:
        """What the tokenizer process and then the server do with a step's output."""
        deltas, abort_ids = self.llm.processor.process(step)
        if abort_ids:
            self.llm.engine.loop.take([AbortRequests(abort_ids, AbortReason.STOP_STRING)])
        self._on_deltas(deltas)
        for error in self.llm.processor.rejected(step):
            self._on_request_error(error)

    def _send(self, message: Any) -> None:
        if isinstance(message, Generate):
            self._submit(message)
        elif isinstance(message, Abort):
            live = self.llm.processor.forget(message.req_ids)
            if live:
                self.llm.engine.loop.take([AbortRequests(live, AbortReason.CLIENT)])
        else:
            raise NotImplementedError(f"no batch sends {type(message).__name__}")

    def _submit(self, generate: Generate) -> None:
        n = generate.params.n
        try:
            prepared = self._prepare(generate)
        except PromptError as error:
            self._on_request_error(
                RequestError(
                    generate.req_id, n, error.status, error.code, error.message, error.param
                )
            )
            return
        self._on_accepted(
            Accepted(
                req_id=generate.req_id,
                num_prompt_tokens=prepared.num_prompt_tokens,
                prompt_text=prepared.prompt_text,
                prompt_token_ids=prepared.token_ids.tobytes() if generate.want_token_ids else None,
                prompt_end=prepared.prompt_end,
            )
        )
        for request in prepared.requests:
            self.llm.processor.add(
                request,
                prepared.copies,
                generate.want_token_ids,
                prepared.token_texts,
                generate.shown_special,
            )
        self.llm.engine.loop.take(list(prepared.requests))

    def _prepare(self, generate: Generate) -> PreparedRequest:
        """Raises PromptError."""
        llm = self.llm
        prepared = prepare(llm.encoder, generate, llm.limits, llm.config.seed, llm.constraints)
        if generate.want_prompt_text and generate.params.prompt_logprobs is not None:
            texts = token_texts(llm.constraints.vocabulary, prepared.token_ids, prepared.added)
            prepared = replace(prepared, prompt_text="".join(texts), token_texts=texts)
        structured = any(request.params.structured is not None for request in prepared.requests)
        if structured and not llm.engine_has_pieces:
            llm.engine.loop.take([llm.constraints.pieces])
            llm.engine_has_pieces = True
        return prepared


def make_service(server: ServerConfig, engine: EngineConfig, client: LocalClient) -> Service:
    """What the server's routes know: names, defaults of requests, limits, rules for chats."""
    model = client.llm.config.model
    names = server.served_model_name or [engine.model or default_model_name()]
    exporter = Exporter(client.metrics, client.status, names[0], server.max_queued_requests)
    service = Service(server, client, exporter, names, engine_config=client.llm.config)
    service.model_digest = model_digest(model)
    if server.generation_config == "auto":
        service.defaults = sampling_defaults(model)
    return service
