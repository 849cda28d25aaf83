"""The server's client with the engine in this process: `EngineClient(LocalLink(...), ...)`.

    EngineClient ──Generate, Abort──► LocalLink ──► OfflineEngine
    EngineClient ◄──Accepted, Deltas, RequestError── LocalLink ◄── OfflineEngine.step

Whatever a request means to the server it means here, as the same code reads it and answers it.
"""

from collections.abc import Callable
from typing import Any

from engine.api.config import EngineConfig
from engine.api.messages import Abort, Generate, Ingress, TokenizerReady
from engine.offline import OfflineEngine
from tokenizer_proc.errors import PromptError
from tokenizer_proc.pipeline import accepted, refused


class LocalLink:
    """A `server.link.Link` without sockets: what is sent is done at once, and `step` brings answers."""

    def __init__(self, config: EngineConfig, chat_template: str) -> None:
        """Loads the model. Raises ConfigError or TokenizerLoadError."""
        self.engine = OfflineEngine(config, chat_template, self._reply, self._reply)
        self._on_reply: Callable[[Any], None] | None = None

    def start(self, on_reply: Callable[[Any], None], on_state: Callable[[Any], None]) -> None:
        self._on_reply = on_reply
        chat_template = self.engine.pipeline.encoder.chat.template_text
        self._reply(TokenizerReady(limits=self.engine.limits, chat_template=chat_template))

    def send(self, message: Ingress) -> None:
        if isinstance(message, Generate):
            self._generate(message)
        elif isinstance(message, Abort):
            self.engine.abort(message.req_ids)
        else:
            raise TypeError(f"a batch sends Generate and Abort, not {type(message).__name__}")

    def step(self) -> None:
        """One step of the engine, if it has anything to do."""
        if self.engine.has_work():
            self.engine.step()

    def close(self) -> None:
        self.engine.shutdown()

    def _generate(self, generate: Generate) -> None:
        try:
            prepared = self.engine.pipeline.prepare(generate)
        except PromptError as error:
            self._reply(refused(generate, error))
            return
        self._reply(accepted(generate, prepared))
        self.engine.submit(generate, prepared)

    def _reply(self, message: Any) -> None:
        assert self._on_reply is not None, "a client starts its link before it sends"
        self._on_reply(message)
