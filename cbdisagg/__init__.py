"""cbdisagg: LLM serving with prefill and decode in separate worker processes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbdisagg.llm import LLM, AsyncLLM, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Resolved on first use: a worker or the coordinator never imports the Python API.
    if name in ("LLM", "AsyncLLM", "SamplingParams"):
        return getattr(import_module("cbdisagg.llm"), name)
    raise AttributeError(f"module 'cbdisagg' has no attribute {name!r}")
