"""Fill a model with weights: each layer names the tensors it is made of, the loader brings them.

One layer at a time is allocated, filled and handed over, so that the peak is the model plus one layer
even where a layer repacks what it gets. What is missing, has another shape than config.json says, or is
left over in the files is an error that names layer, tensor and file.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.api.config import ConfigError
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, build_model
from engine.ops.linear import can_pack
from engine.weights.checkpoint import FLOAT_TYPES, Checkpoint, open_checkpoint
from engine.weights.kv_scales import Scales, read_kv_scales
from engine.weights.slots import Slot, Source

logger = logging.getLogger(__name__)

Progress = Callable[[float, str], None]
ROTARY_BUFFER = ".rotary_emb.inv_freq"  # computed from the config; older checkpoints store it
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
COMPARED_ROWS = 4096  # of two tensors at a time
SHOWN_NAMES = 5


def load_model(
    path: str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    dummy: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    fused: bool | None = None,
) -> Decoder:
    """Build the model of `config` and load its weights from `path` (directory or .gguf file).

    `config.max_model_len` is the longest sequence that will be served: two rope kinds depend on it
    (engine/layers/rotary.py). `dummy` draws random weights from `seed` instead of reading any. `progress(fraction, what)` is called per layer. `fused`: see build_model.
    Raises ConfigError naming layer, tensor and file if the checkpoint does not fit the config.
    """
    reader: Reader | DummyReader
    reader = DummyReader(seed) if dummy else Reader(open_checkpoint(path), path, dtype)
    if config.tie_word_embeddings:
        config = replace(config, tie_word_embeddings=reader.has_one_table())
    model = build_model(config, dtype, device, fused)
    layers = [(layer, layer.slots()) for layer in model.weighted_layers()]
    total = sum(math.prod(slot.shape) for _, slots in layers for slot in slots)
    done = 0
    for layer, slots in layers:
        tensors = []
        for slot in slots:
            tensor = torch.empty(slot.shape, dtype=dtype, device=device)
            reader.fill(slot, tensor)
            tensors.append(tensor)
            done += tensor.numel()
        layer.take(tensors)
        del tensors  # before the next layer is allocated
        if progress is not None and slots:
            progress(done / total, slots[0].layer)
    model.kv_scales = reader.kv_scales(model.num_layers)
    reader.finish(config)
    return model


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that `load_model` takes on a GPU, found without loading anything."""
    model = build_model(replace(config, max_model_len=1), dtype, torch.device("cpu"))
    slots = [slot for layer in model.weighted_layers() for slot in layer.slots()]
    return sum(math.prod(slot.shape) for slot in slots) * dtype.itemsize


def cpu_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """The same on a CPU, where the head of a model that ties it to the embedding is a packed copy."""
    size = weight_bytes(config, dtype)
    if config.tie_word_embeddings and can_pack(dtype):
        size += config.vocab_size * config.hidden_size * dtype.itemsize
    return size


class Reader:
    """Reads slots from a checkpoint and keeps account of what was used."""

    def __init__(self, checkpoint: Checkpoint, path: str, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.path = path
        self.dtype = str(dtype).removeprefix("torch.")
        self.load_dtype = dtype
        self.unused = dict(checkpoint.files)
        self.noted_casts: set[str] = set()
        self.stored_as: dict[str, str] = {}  # tensors that are there under another name

    def has_one_table(self) -> bool:
        """Whether embedding and head are one, as config.json says, by what is stored.

        Of two that differ each is used, as transformers does: somebody trained them apart. A head of
        another shape, as padding makes it, has no place in the model.
        """
        files = self.checkpoint.files
        if HEAD not in files:
            return True
        if EMBEDDING not in files:
            self.stored_as[EMBEDDING] = HEAD
            return True
        shapes = [list(self.checkpoint.describe(name)[0]) for name in (HEAD, EMBEDDING)]
        if shapes[0] != shapes[1]:
            logger.warning(
                "%s: %s is not used: config.json ties it to the embedding, but it has shape %s and the "
                "embedding %s, which is used in its place",
                *(files[HEAD], HEAD, *shapes),
            )
            del self.unused[HEAD]
            return True
        if self.is_equal(EMBEDDING, HEAD):
            del self.unused[HEAD]
            return True
        logger.warning(
            "%s: %s is not the embedding, although config.json ties them; it is used. "
            "To silence this, set tie_word_embeddings to false in config.json",
            *(files[HEAD], HEAD),
        )
        return False

    def is_equal(self, one: str, other: str) -> bool:
        """Whether two tensors of one shape are, once they are loaded."""
        shape, _ = self.checkpoint.describe(one)
        if not shape:
            return False
        for row in range(0, shape[0], COMPARED_ROWS):
            region = (slice(row, row + COMPARED_ROWS),)
            a, b = (
                self.checkpoint.read(Source(name, shape, region)).to(self.load_dtype)
                for name in (one, other)
            )
            if not torch.equal(a, b):
                return False
        return True

    def fill(self, slot: Slot, target: Tensor) -> None:
        """Read the slot's sources into `target`, one below the other."""
        row = 0
        for source in slot.sources:
            source = replace(source, name=self.stored_as.get(source.name, source.name))
            self.check(slot, source)
            rows = source.region_shape[0]
            target[row : row + rows].copy_(self.checkpoint.read(source))
            row += rows

    def check(self, slot: Slot, source: Source) -> None:
        """Raise ConfigError unless the source is there, has its shape and is not quantized."""
        files = self.checkpoint.files
        if source.name not in files:
            looked_in = sorted(set(files.values()))
            raise ConfigError(
                f"{slot.layer}: needs tensor {source.name}, which none of the {len(looked_in)} weight "
                f"files in {self.path} has ({', '.join(looked_in[:SHOWN_NAMES])}); is the checkpoint "
                "complete, and is config.json its own?"
            )
        self.unused.pop(source.name, None)
        file = files[source.name]
        shape, dtype = self.checkpoint.describe(source.name)
        if shape != source.shape:
            raise ConfigError(
                f"{slot.layer}: tensor {source.name} in {file} has shape {list(shape)}, but by "
                f"config.json it must be {list(source.shape)}"
            )
        if dtype not in FLOAT_TYPES.values():
            raise ConfigError(
                f"{slot.layer}: tensor {source.name} in {file} is stored as {dtype}; only "
                f"{', '.join(FLOAT_TYPES.values())} can be loaded"
            )
        if dtype != self.dtype and dtype not in self.noted_casts:
            self.noted_casts.add(dtype)
            logger.info("weights are converted from %s to %s while loading", dtype, self.dtype)

    def kv_scales(self, num_layers: int) -> list[Scales]:
        """What each layer's keys and values are to be divided by in an 8-bit cache."""
        scales, used = read_kv_scales(self.checkpoint, num_layers)
        for name in used:
            self.unused.pop(name, None)
        return scales

    def finish(self, config: ModelConfig) -> None:
        """Raise ConfigError if tensors are left over that ought to have a place in the model."""
        left = {n: f for n, f in self.unused.items() if not n.endswith(ROTARY_BUFFER)}
        if left:
            names = ", ".join(f"{name} ({file})" for name, file in list(left.items())[:SHOWN_NAMES])
            more = f" and {len(left) - SHOWN_NAMES} more" if len(left) > SHOWN_NAMES else ""
            raise ConfigError(
                f"{self.path}: {len(left)} tensors have no place in a {config.architecture} with "
                f"{config.num_layers} layers: {names}{more}; is config.json the checkpoint's own?"
            )


class DummyReader:
    """Random weights of the right shapes, scaled so that activations neither vanish nor explode."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator: torch.Generator | None = None

    def fill(self, slot: Slot, target: Tensor) -> None:
        if target.dim() == 1:
            target.fill_(0.0 if slot.sources[0].name.endswith(".bias") else 1.0)
        else:
            if (
                self.generator is None
            ):  # on the weights' own device, which may be a hundred times faster
                self.generator = torch.Generator(target.device).manual_seed(self.seed)
            target.normal_(0.0, target.shape[-1] ** -0.5, generator=self.generator)

    def has_one_table(self) -> bool:
        return True

    def kv_scales(self, num_layers: int) -> list[Scales]:
        return [(1.0, 1.0)] * num_layers

    def finish(self, config: ModelConfig) -> None:
        logger.info("weights are random (load format dummy): %s", config.architecture)
