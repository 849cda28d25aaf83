"""A model with tokenizer and engine in one process: what three processes do for the server.

    Generate ──► TextPipeline ──AddRequest──► StepLoop
    Deltas   ◄── TextPipeline ◄──StepOutput── StepLoop

It moves only when `step` is called, in the caller's thread. Used by `LLM` and by batches.
"""

import ctypes
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from engine.api.config import EngineConfig
from engine.api.messages import (
    AbortReason,
    AbortRequests,
    Deltas,
    Generate,
    RequestError,
    StepOutput,
)
from engine.build import build_engine
from engine.models.config import ModelConfig
from engine.weights.gguf import convert_gguf
from server.default_model import BarProgress, ensure_default_model
from tokenizer_proc.encode import Encoder
from tokenizer_proc.loading import check_fits_model, load_tokenizer
from tokenizer_proc.pipeline import TextPipeline, choice_ids
from tokenizer_proc.prepare import PreparedRequest
from tokenizer_proc.vocabulary import Vocabulary


class OfflineEngine:
    """Without a model in the config, the small default model is prepared and used."""

    def __init__(
        self,
        config: EngineConfig,
        chat_template: str,
        on_deltas: Callable[[Deltas], None],
        on_error: Callable[[RequestError], None],
    ) -> None:
        """Raises ConfigError or TokenizerLoadError. The callbacks run inside `step`."""
        self._on_deltas = on_deltas
        self._on_error = on_error
        path = config.model or str(ensure_default_model(BarProgress()))
        self._remove_converted: Callable[[], object] | None = None
        if path.endswith(".gguf") and not config.tokenizer:  # its tokenizer is in the file
            folder = tempfile.mkdtemp(prefix="sluice-gguf-")
            self._remove_converted = weakref.finalize(self, remove_in, os.getpid(), folder)
            convert_gguf(path, folder)
            path = folder
        self.config = replace(config, model=path)
        ModelConfig.from_directory(path)  # a wrong path is told before anything takes time
        self.tokenizer = load_tokenizer(config.tokenizer or path, chat_template)
        engine = build_engine(self.config, self._receive)
        self.loop = engine.loop
        self.limits = engine.limits
        check_fits_model(self.tokenizer, self.limits.vocab_size)
        self.pipeline = TextPipeline(
            Encoder(self.tokenizer), Vocabulary(self.tokenizer), self.limits, config.seed
        )

    def shutdown(self) -> None:
        """Free weights and KV cache. The object cannot be used afterwards."""
        self.pipeline.close()
        del self.loop, self.pipeline
        if self._remove_converted is not None:
            self._remove_converted()

    def submit(self, generate: Generate, prepared: PreparedRequest) -> None:
        """Queue what `pipeline.prepare` made of a request."""
        messages = self.pipeline.submit(generate, prepared, choice_ids(generate))
        self.loop.take([*messages])

    def abort(self, req_ids: list[int]) -> None:
        """Forget requests; ids that have ended are ignored."""
        live = self.pipeline.output.forget(req_ids)
        if live:
            self.loop.take([AbortRequests(req_ids=live, reason=AbortReason.CLIENT)])

    def has_work(self) -> bool:
        return self.loop.has_work()

    def step(self) -> None:
        """One step of the engine; call it only while there is work."""
        self.loop.step()

    def _receive(self, step: StepOutput) -> None:
        output = self.pipeline.output
        deltas, abort_ids = output.process(step)
        if abort_ids:
            self.loop.take([AbortRequests(req_ids=abort_ids, reason=AbortReason.STOP_STRING)])
        self._on_deltas(deltas)
        for error in output.rejected(step):
            self._on_error(error)


def remove_in(pid: int, folder: str) -> None:
    """Unless this is a forked child, which also comes to its end: the files are its parent's."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def trim_heap() -> None:
    """Give freed memory back to the system: glibc keeps it for a later use, others need no such call."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
