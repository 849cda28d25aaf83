"""Sluice's engine. Importing this package is cheap: `LLM` is loaded on first use, so that
`engine.api` can be imported by processes that must never load torch."""

from typing import TYPE_CHECKING, Any

from engine.api.sampling import SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "SamplingParams", "StructuredOutput"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
