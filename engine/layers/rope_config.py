"""Rotary position settings of config.json, in both spellings, checked (no torch here).

Older files have `rope_theta` and `rope_scaling: {"type" or "rope_type": ...}`, newer ones
`rope_parameters: {"rope_type": ..., "rope_theta": ...}`. engine/layers/rotary.py has the arithmetic.
"""

import math
from dataclasses import dataclass
from typing import Any

from engine.api.config import ConfigError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
OTHER_SPELLINGS = {"su": "longrope"}  # what early Phi-3 configs say
DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class RopeConfig:
    """How position turns into rotation angles. Fields beyond `factor` belong to the kinds named."""

    kind: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_len: int = 0  # positions seen in pre-training
    attention_factor: float = 1.0  # cos and sin are multiplied by it (yarn, longrope)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ends of the ramp to whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope [head_dim / 2]
    long_factors: tuple[float, ...] = ()  # longrope [head_dim / 2]

    @classmethod
    def from_dict(
        cls, raw: dict[str, Any], head_dim: int, max_positions: int, where: str
    ) -> "RopeConfig":
        """From config.json's keys; raises ConfigError for an unknown kind or a missing setting."""
        scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        kind = OTHER_SPELLINGS.get(kind, kind)
        if kind not in KINDS:
            raise ConfigError(
                f"{where}: rope type {kind!r} is not supported; supported: {', '.join(KINDS)}"
            )
        partial = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            raise ConfigError(
                f"{where}: partial_rotary_factor {partial} is not supported (only 1.0: all of a head)"
            )
        theta = scaling.get("rope_theta") or raw.get("rope_theta") or DEFAULT_THETA
        original = (
            raw.get("original_max_position_embeddings")
            or scaling.get("original_max_position_embeddings")
            or max_positions
        )

        def need(key: str) -> Any:
            if scaling.get(key) is None:
                raise ConfigError(f"{where}: rope type {kind!r} needs {key}, which is missing")
            return scaling[key]

        common: dict[str, Any] = {
            "kind": kind,
            "theta": float(theta),
            "original_max_len": int(original),
        }
        if kind == "default":
            return cls(**common)
        if kind == "longrope":
            return cls._longrope(common, scaling, head_dim, max_positions, where)
        common["factor"] = float(need("factor"))
        if kind == "llama3":
            common["low_freq_factor"] = float(need("low_freq_factor"))
            common["high_freq_factor"] = float(need("high_freq_factor"))
        if kind == "yarn":
            common["beta_fast"] = float(scaling.get("beta_fast") or 32)
            common["beta_slow"] = float(scaling.get("beta_slow") or 1)
            common["truncate"] = bool(scaling.get("truncate", True))
            common["attention_factor"] = yarn_attention_factor(scaling, common["factor"])
        return cls(**common)

    @classmethod
    def _longrope(
        cls,
        common: dict[str, Any],
        scaling: dict[str, Any],
        head_dim: int,
        max_positions: int,
        where: str,
    ) -> "RopeConfig":
        lists = {}
        for key in ("short_factor", "long_factor"):
            lists[key] = tuple(float(x) for x in scaling.get(key) or ())
            if len(lists[key]) != head_dim // 2:
                raise ConfigError(
                    f"{where}: rope type 'longrope' needs {key} with {head_dim // 2} numbers (half of "
                    f"head_dim), got {len(lists[key])}"
                )
        original = common["original_max_len"]
        factor = float(scaling.get("factor") or max_positions / original)
        attention_factor = scaling.get("attention_factor")
        if attention_factor is None:
            attention_factor = (
                1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
            )
        return cls(
            **common,
            factor=factor,
            attention_factor=float(attention_factor),
            short_factors=lists["short_factor"],
            long_factors=lists["long_factor"],
        )

    def max_positions(self, max_position_embeddings: int) -> int:
        """Positions that can be served.

        `max_position_embeddings` counts the scaling in for llama3 and longrope; for linear and
        dynamic it is the length before scaling, and yarn names the length before scaling apart.
        """
        if self.kind in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.kind == "yarn":
            return max(max_position_embeddings, int(self.original_max_len * self.factor))
        return max_position_embeddings


def yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """YaRN's attention temperature (https://arxiv.org/abs/2309.00071, section 3.4), unless given.

    DeepSeek's mscale and mscale_all_dim make it a ratio of two.
    """

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)
