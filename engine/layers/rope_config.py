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
MOST_POSITIONS = 2**24  # the tables of cos and sin have a row for each
MOST_THETA = 1e15
TINY = 1e-6  # what is divided by, or has a logarithm, is at least this


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
        """From config.json's keys.

        Raises ConfigError for an unknown kind, and for a setting that is missing or out of range.
        """
        section = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
        scaling = raw.get(section) or {}
        if not isinstance(scaling, dict):
            raise ConfigError(f"{where}: {section} must be an object, got {scaling!r:.80}")
        kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
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
        theta_key, original_key = "rope_theta", "original_max_position_embeddings"
        with_theta = scaling if scaling.get(theta_key) else raw
        with_original = raw if raw.get(original_key) else scaling
        least = 2 if kind == "longrope" else 1  # of positions: longrope divides by a logarithm
        original = number(with_original, original_key, where, least, MOST_POSITIONS, max_positions)

        def need(key: str, low: float, high: float = MOST_POSITIONS) -> float:
            if scaling.get(key) is None:
                raise ConfigError(f"{where}: rope type {kind!r} needs {key}, which is missing")
            return number(scaling, key, where, low, high)

        common: dict[str, Any] = {
            "kind": kind,
            "theta": number(with_theta, theta_key, where, 1 + TINY, MOST_THETA, DEFAULT_THETA),
            "original_max_len": int(original),
        }
        if kind == "default":
            return cls(**common)
        if kind == "longrope":
            return cls._longrope(common, scaling, head_dim, max_positions, where)
        common["factor"] = need("factor", 1)
        if kind == "dynamic" and head_dim < 4:
            raise ConfigError(f"{where}: rope type 'dynamic' needs a head_dim of 4, got {head_dim}")
        if kind == "llama3":
            low = common["low_freq_factor"] = need("low_freq_factor", TINY)
            common["high_freq_factor"] = need("high_freq_factor", low + TINY)
        if kind == "yarn":
            common["beta_fast"] = number(scaling, "beta_fast", where, TINY, MOST_POSITIONS, 32)
            common["beta_slow"] = number(scaling, "beta_slow", where, TINY, MOST_POSITIONS, 1)
            common["truncate"] = bool(scaling.get("truncate", True))
            common["attention_factor"] = yarn_attention_factor(scaling, common["factor"], where)
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
            factors = scaling.get(key) or []
            if not isinstance(factors, list | tuple):
                raise ConfigError(f"{where}: {key} must be a list, got {factors!r:.80}")
            lists[key] = tuple(in_range(x, key, where, TINY, MOST_THETA) for x in factors)
            if len(lists[key]) != head_dim // 2:
                raise ConfigError(
                    f"{where}: rope type 'longrope' needs {key} with {head_dim // 2} numbers (half of "
                    f"head_dim), got {len(lists[key])}"
                )
        original = common["original_max_len"]
        usual = max_positions / original
        factor = number(scaling, "factor", where, TINY, MOST_POSITIONS, usual)
        computed = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        return cls(
            **common,
            factor=factor,
            attention_factor=number(
                scaling, "attention_factor", where, TINY, MOST_POSITIONS, computed
            ),
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


def number(
    values: dict[str, Any],
    key: str,
    where: str,
    low: float,
    high: float,
    default: float | None = None,
) -> float:
    """`values[key]`, or `default` where it is absent, null or 0. Raises ConfigError naming the key."""
    value = values.get(key)
    if default is not None and (value is None or value == 0):
        return default
    return in_range(value, key, where, low, high)


def in_range(value: Any, key: str, where: str, low: float, high: float) -> float:
    """Refuses what is no number, infinity and NaN, too."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise ConfigError(
            f"{where}: {key} must be a number from {low:g} to {high:g}, got {value!r:.80}"
        )
    return float(value)


def yarn_attention_factor(scaling: dict[str, Any], factor: float, where: str) -> float:
    """YaRN's attention temperature (https://arxiv.org/abs/2309.00071, section 3.4), unless given.

    DeepSeek's mscale and mscale_all_dim make it a ratio of two.
    """

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return number(scaling, "attention_factor", where, TINY, MOST_POSITIONS)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        part, whole = (
            number(scaling, key, where, TINY, MOST_POSITIONS)
            for key in ("mscale", "mscale_all_dim")
        )
        return temperature(part) / temperature(whole)
    return temperature(1.0)
