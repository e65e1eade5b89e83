"""The work of every engine. It uses only the standard library, because a peer's interpreter
imports it too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

DTYPES = ("auto", "float32", "bfloat16", "float16")
_NUM_SPECIAL = 16  # ids below it are special tokens
_WARM_UP_OUTPUT = 8  # tokens: enough to have made every kind of step


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of work: `num_prompts` prompts at once, answered with `num_output` tokens each."""

    name: str
    num_prompts: int
    num_prompt_tokens: int
    num_output: int

    @property
    def warm_up_output(self) -> int:
        return min(self.num_output, _WARM_UP_OUTPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Sizes in tokens. Each kind of work is timed `repeat` times after one warm-up."""

    single_prompt: int = 128
    single_output: int = 128
    batch_size: int = 16
    batch_prompt: int = 128
    batch_output: int = 64
    prefill_prompt: int = 1024
    repeat: int = 3
    seed: int = 0

    @property
    def longest(self) -> int:
        """Returns the number of tokens of the longest sequence."""
        single = self.single_prompt + self.single_output
        return max(single, self.batch_prompt + self.batch_output, self.prefill_prompt + 1)

    def kinds(self) -> tuple[Kind, ...]:
        """Returns the kinds of work; times of one-token answers are subtracted from those of
        long answers.
        """

        def kind(name: str, num_prompts: int, num_prompt_tokens: int, num_output: int) -> Kind:
            return Kind(
                name=name,
                num_prompts=num_prompts,
                num_prompt_tokens=num_prompt_tokens,
                num_output=num_output,
            )

        return (
            kind("ttft", 1, self.single_prompt, 1),
            kind("single", 1, self.single_prompt, self.single_output),
            kind("batch_first", self.batch_size, self.batch_prompt, 1),
            kind("batch", self.batch_size, self.batch_prompt, self.batch_output),
            kind("prefill", 1, self.prefill_prompt, 1),
        )


def make_prompts(rng: random.Random, kind: Kind, vocab_size: int) -> list[list[int]]:
    """Returns random ids, so that no two prompts share a prefix that a cache could keep."""
    return [
        [rng.randrange(_NUM_SPECIAL, vocab_size) for _ in range(kind.num_prompt_tokens)]
        for _ in range(kind.num_prompts)
    ]
