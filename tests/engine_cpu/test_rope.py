"""Rotary settings: both spellings, every kind's frequencies, and errors that name what is wrong."""

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.api.config import ConfigError
from engine.layers.rope_config import RopeConfig
from engine.layers.rotary import Rotary, inverse_frequencies

HEAD_DIM = 64
MAX_POSITIONS = 4096
FACTORS = {
    "short_factor": [1.0 + 0.01 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [1.0 + 0.5 * i for i in range(HEAD_DIM // 2)],
}
ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
    {"rope_type": "longrope", "original_max_position_embeddings": 1024, **FACTORS},
    {
        "rope_type": "longrope",
        "original_max_position_embeddings": 1024,
        "factor": 2.0,
        **FACTORS,
    },
    {
        "rope_type": "longrope",
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.25,
        **FACTORS,
    },
]


def parse(raw: dict[str, Any], head_dim: int = HEAD_DIM) -> RopeConfig:
    return RopeConfig.from_dict(raw, head_dim, MAX_POSITIONS, "config.json")


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: " ".join(map(str, list(s)[:4])))
@pytest.mark.parametrize("length", [512, 8192])
def test_frequencies_equal_transformers(scaling: dict[str, Any], length: int) -> None:
    parameters = {"rope_theta": 500_000.0, **scaling}
    theirs = transformers.LlamaConfig(
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(parameters),
    )
    kind = scaling["rope_type"]
    want, attention_factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), seq_len=length)
    rope = parse({"rope_parameters": parameters})
    got = inverse_frequencies(rope, HEAD_DIM, length)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor)


def test_both_spellings_mean_the_same() -> None:
    newer = parse({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}})
    older = parse({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}})
    oldest = parse({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}})
    assert newer == older == oldest
    assert newer.theta == 5e5
    assert parse({}) == parse({"rope_scaling": None, "rope_theta": 10000.0})
    assert parse({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}).theta == 7.0


def test_the_length_before_scaling_may_stand_beside_the_scaling() -> None:
    raw = {
        "rope_scaling": {"type": "longrope", **FACTORS},
        "original_max_position_embeddings": 1024,
    }
    rope = parse(raw)
    assert rope.original_max_len == 1024
    assert rope.factor == MAX_POSITIONS / 1024
    assert rope == parse({**raw, "rope_scaling": {"type": "su", **FACTORS}})


@pytest.mark.parametrize(
    ("scaling", "want"),
    [
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "llama3", **LLAMA3}, 4096),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "longrope", **FACTORS}, 4096),
    ],
)
def test_positions_that_can_be_served(scaling: dict[str, Any], want: int) -> None:
    assert parse({"rope_parameters": scaling}).max_positions(MAX_POSITIONS) == want


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_scaling": {"type": "spiral"}}, r"'spiral' is not supported; supported: default, "),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "'llama3' needs low_freq_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, r"needs short_factor with"),
        ({"rope_theta": "x"}, r"rope_theta must be a number from 1 to .*, got 'x'"),
        ({"rope_theta": math.inf}, "rope_theta must be a number"),
        ({"rope_scaling": "x"}, "rope_scaling must be an object, got 'x'"),
        ({"rope_scaling": {"type": ["x"]}}, "is not supported; supported: default, "),
        *(
            ({"rope_scaling": {"type": "linear", "factor": f}}, "factor must be a number from 1 to")
            for f in (0, -2, 1e300, math.nan, True, "x")
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": -1}}, "beta_fast must be"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 0}},
            "attention_factor",
        ),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1}}, "high_freq_factor"),
        (
            {"rope_scaling": {"type": "longrope", **FACTORS}, ORIGINAL: 1},
            "original_max_position_embeddings must be a number from 2 to",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": 5}}, "short_factor must be a list"),
        ({"rope_scaling": {"type": "longrope", "short_factor": ["x"]}}, "short_factor must be a n"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_errors_name_the_setting(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(raw)
    assert str(caught.value).startswith("config.json: ")
    assert caught.value.exit_code == 2


def test_table_holds_cos_and_signed_sin_in_the_model_s_dtype() -> None:
    rope = parse({"rope_scaling": {"type": "yarn", "factor": 4.0}}, head_dim=8)
    rotary = Rotary(rope, 8, 100, torch.bfloat16, torch.device("cpu"))
    positions = torch.tensor([0, 99, 7])
    cos, sin = rotary.of_rows(rotary.table[positions])
    assert cos.shape == sin.shape == (3, 1, 8)
    assert cos.dtype == sin.dtype == torch.bfloat16
    angles = positions[:, None].float() * inverse_frequencies(rope, 8, 100)
    scale = rope.attention_factor
    assert scale > 1
    assert torch.equal(cos[:, 0, :4], (angles.cos() * scale).bfloat16())
    assert torch.equal(cos[:, 0, 4:], cos[:, 0, :4])
    assert torch.equal(sin[:, 0, 4:], (angles.sin() * scale).bfloat16())
    assert torch.equal(sin[:, 0, :4], -sin[:, 0, 4:])
