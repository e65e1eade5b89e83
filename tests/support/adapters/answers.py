"""What an adapter's answers are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.offline.llm import LLM
from moe_serve.offline.outputs import RequestOutput

PROMPTS = ([5, 9, 20, 77, 31, 8], [250, 3, 4, 99, 12, 44, 61, 7, 18, 6, 90, 41, 2])
# The second answer begins a second page.
GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, prompt_logprobs=1, logprobs=1)


def adapters_of(**folders: Path) -> dict[str, str]:
    """Returns the argument of LLM(adapters=...)."""
    return {name: str(folder) for name, folder in folders.items()}


def answers(
    llm: LLM, adapter: str | None = None, prompts: Sequence[list[int]] = PROMPTS
) -> list[RequestOutput]:
    return llm.generate(list(prompts), GREEDY, adapter=adapter, use_progress_bar=False)


def answers_of(folder: Path, **model: Any) -> list[RequestOutput]:
    """Returns the answers of a checkpoint."""
    with LLM(str(folder), **model) as llm:
        return answers(llm)


def content(outputs: Sequence[RequestOutput]) -> list[object]:
    """Returns tokens and log probabilities, for a comparison of every bit."""
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def largest_difference(some: Sequence[RequestOutput], others: Sequence[RequestOutput]) -> float:
    """Returns the largest difference between log probabilities of the prompts' tokens."""
    return max(
        abs(a - b)
        for one, other in zip(some, others, strict=True)
        for a, b in zip(logprobs_of(one), logprobs_of(other), strict=True)
    )


def logprobs_of(output: RequestOutput) -> list[float]:
    """Returns the log probabilities of the prompt's tokens but the first."""
    found = output.prompt_logprobs or []
    return [
        described[token].logprob
        for token, described in zip(output.prompt_token_ids[1:], found[1:], strict=True)
        if described is not None
    ]
