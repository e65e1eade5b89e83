"""Messages to and from a worker, one JSON object per line. Uses only the standard library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The first line: the engine to create, and the most work that it will get."""

    engine: str  # "moe-serve", or a peer's name
    variant: str  # "" for an engine that has only one
    model: str  # checkpoint folder in Hugging Face layout
    gguf: str | None  # the same weights as one file, for llama.cpp
    dtype: str  # of the weights, never "auto"
    num_threads: int
    max_model_len: int  # tokens of one sequence
    max_num_seqs: int  # sequences at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The answer to a Job: the engine can take work."""

    versions: dict[str, str]
    cache_bytes: int | None  # of the KV cache, if the engine says


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Every further line: prompts to continue greedily, without stopping early."""

    prompts: list[list[int]]
    num_output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a Turn."""

    seconds: float  # the worker's clock: the pipe is not in it
    token_ids: list[list[int]]
