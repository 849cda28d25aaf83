"""The server's client of the engine, with the engine in this process and no sockets in between.

    EngineClient.generate ──Generate──► TextPipeline ──AddRequest──► StepLoop.take
    RequestStream ◄──────────Deltas──── TextPipeline ◄──StepOutput── StepLoop.step

Whatever a request means to the server it means here, as the same code reads it and answers it; the parts
that the server spreads over three processes (text to ids, engine, ids to text) are `LLM`'s.
"""

from typing import Any

from engine.api.config import EngineConfig
from engine.api.messages import (
    Abort,
    AbortReason,
    AbortRequests,
    Generate,
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
from tokenizer_proc.pipeline import accepted, choice_ids, refused

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
                chat_template=llm.pipeline.encoder.chat.template_text,
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
        deltas, abort_ids = self.llm.pipeline.output.process(step)
        if abort_ids:
            self.llm.engine.loop.take([AbortRequests(abort_ids, AbortReason.STOP_STRING)])
        self._on_deltas(deltas)
        for error in self.llm.pipeline.output.rejected(step):
            self._on_request_error(error)

    def _send(self, message: Any) -> None:
        if isinstance(message, Generate):
            self._submit(message)
        elif isinstance(message, Abort):
            live = self.llm.pipeline.output.forget(message.req_ids)
            if live:
                self.llm.engine.loop.take([AbortRequests(live, AbortReason.CLIENT)])
        else:
            raise NotImplementedError(f"no batch sends {type(message).__name__}")

    def _submit(self, generate: Generate) -> None:
        pipeline = self.llm.pipeline
        try:
            prepared = pipeline.prepare(generate)
        except PromptError as error:
            self._on_request_error(refused(generate, error))
            return
        self._on_accepted(accepted(generate, prepared))
        messages = pipeline.submit(generate, prepared, choice_ids(generate))
        self.llm.engine.loop.take([*messages])


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
