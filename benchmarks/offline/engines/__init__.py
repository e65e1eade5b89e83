"""Adapters of the measured engines. Each imports its engine only when it is created."""

from __future__ import annotations

import importlib.metadata
from typing import Protocol

from ..job import Job, Ready


class Engine(Protocol):
    """An interface: continues prompts greedily and never stops early."""

    def ready(self) -> Ready: ...

    def generate(self, prompts: list[list[int]], num_output: int) -> list[list[int]]:
        """Returns `num_output` token ids for each prompt."""
        ...


def make_engine(job: Job) -> Engine:
    """Loads the model. The imports are here because each interpreter has only its own engine."""
    if job.engine == "moe-serve":
        from .own import MoeServe

        return MoeServe(job)
    if job.engine == "transformers":
        from .hugging_face import Transformers

        return Transformers(job)
    if job.engine == "llama.cpp":
        from .llama import LlamaCpp

        return LlamaCpp(job)
    assert job.engine in ("vllm", "vllm-zentorch"), f"no engine is called {job.engine!r}"
    from .vllm_cpu import Vllm

    return Vllm(job)


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of installed distributions; absent ones are left out."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
