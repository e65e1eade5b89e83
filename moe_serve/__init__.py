"""moe-serve: an expert-parallel inference server for Mixture-of-Experts language models.

    from moe_serve import LLM, SamplingParams

Importing the package imports no torch: the public names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_serve.engine.request.constraint import Constraint
    from moe_serve.engine.request.sampling_params import SamplingParams
    from moe_serve.offline.llm import LLM
    from moe_serve.offline.outputs import CompletionOutput, Logprob, RequestOutput

__version__ = "0.2.0"

_HOMES = {
    "LLM": "moe_serve.offline.llm",
    "CompletionOutput": "moe_serve.offline.outputs",
    "Constraint": "moe_serve.engine.request.constraint",
    "Logprob": "moe_serve.offline.outputs",
    "RequestOutput": "moe_serve.offline.outputs",
    "SamplingParams": "moe_serve.engine.request.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'moe_serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


__all__ = [
    "LLM",
    "CompletionOutput",
    "Constraint",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]
