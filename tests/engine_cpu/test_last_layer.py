"""What nobody reads of the last layer is not computed, and what is computed is the same without that."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, NewTokens, StepInputs
from tests.engine_cpu.harness import Collected, Harness
from tests.engine_cpu.tiny_models import make_tiny

PROMPT = [(7 * i * i + 3 * i) % 509 + 3 for i in range(40)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny("qwen3", tmp_path_factory.mktemp("last"), tokenizer=False)


class Watched(Harness):
    """Notes how many rows attention and what follows it had, by layer."""

    def __init__(self, model: str, **settings: object) -> None:
        super().__init__(Path(model), **settings)
        self.attended: list[tuple[int, int]] = []
        self.finished: list[tuple[int, int]] = []
        for layer in self.loop.runner.model.layers:  # type: ignore[attr-defined]
            self.watch(layer)

    def watch(self, layer) -> None:
        attend, add_rest = layer.attend, layer.add_rest

        def noted_attend(new: NewTokens, *args: object) -> Tensor:
            self.attended.append((layer.index, len(new.qkv)))
            return attend(new, *args)

        def noted_rest(hidden: Tensor, attended: Tensor) -> None:
            self.finished.append((layer.index, len(hidden)))
            add_rest(hidden, attended)

        layer.attend, layer.add_rest = noted_attend, noted_rest


def test_chunks_that_do_not_sample_end_before_the_last_attention(model_dir: str) -> None:
    harness = Watched(model_dir, max_num_batched_tokens=16, max_num_seqs=4)
    harness.generate(PROMPT, max_tokens=2)
    decode = [(0, 2), (1, 2)]  # a lone row is padded to two
    assert harness.attended == [(0, 16), (0, 16), (0, 8), (1, 8), *decode]
    assert harness.finished == [(0, 16), (0, 16), (0, 8), (1, 4), *decode]


def test_a_scored_prompt_takes_all_its_rows_through(model_dir: str) -> None:
    harness = Watched(model_dir, max_num_batched_tokens=16, max_num_seqs=4)
    harness.generate(PROMPT, max_tokens=0, prompt_logprobs=1)
    assert harness.finished == [(0, 16), (1, 16), (0, 16), (1, 16), (0, 8), (1, 8)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_wanted_rows_are_those_of_all_bit_for_bit(model_dir: str, dtype: str) -> None:
    """Requests that come while others decode, some of them in chunks, against models that cut nothing."""

    def run(cuts: bool) -> dict[int, Collected]:
        harness = Harness(
            Path(model_dir), dtype=dtype, max_num_batched_tokens=48, max_num_seqs=8, block_size=16
        )
        model = harness.loop.runner.model
        forward = model.forward

        def uncut(inputs: StepInputs, attention: AttentionBackend, wanted: Tensor | None) -> Tensor:
            hidden = forward(inputs, attention)
            return hidden if wanted is None else hidden.index_select(0, wanted)

        if not cuts:
            model.forward = uncut  # type: ignore[method-assign]
        for i in range(12):
            scored = {"prompt_logprobs": 2} if i % 4 == 3 else {}
            prompt = [(token + 31 * i) % 500 + 3 for token in PROMPT[i:]] * (1 + i % 3)
            harness.add(i, prompt, max_tokens=9, logprobs=3, **scored)
            harness.step()
        return harness.run()

    want, got = run(cuts=False), run(cuts=True)
    for i, result in want.items():
        assert got[i].token_ids == result.token_ids
        assert got[i].logprobs == result.logprobs  # floats: equal bits
        assert got[i].prompt_logprobs == result.prompt_logprobs


def test_the_cache_is_written_for_rows_that_nobody_wants(model_dir: str) -> None:
    """A prompt whose chunks never sampled is found in the cache of the last layer, too."""
    harness = Harness(Path(model_dir), max_num_batched_tokens=16, max_num_seqs=4, block_size=16)
    harness.generate(PROMPT[:33], max_tokens=1)
    found = harness.generate([*PROMPT[:33], 5, 6], max_tokens=8, logprobs=1)
    assert found.cached_tokens == 32
    cold = Harness(Path(model_dir), enable_prefix_caching=False)
    computed = cold.generate([*PROMPT[:33], 5, 6], max_tokens=8, logprobs=1)
    assert found.token_ids == computed.token_ids
    torch.testing.assert_close(
        torch.tensor(found.logprobs), torch.tensor(computed.logprobs), rtol=0, atol=1e-4
    )
