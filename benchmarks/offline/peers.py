"""The engines that moe-serve is compared with, and their names on the command line.

--peer transformers                    in this interpreter, its first variant
--peer transformers/eager              another variant
--peer vllm/eager=envs/vllm/bin/python in an environment of its own
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from dataclasses import dataclass

OWN = "moe-serve"
VARIANTS = {
    "llama.cpp": ("",),
    "vllm": ("compiled", "eager"),
    "vllm-zentorch": ("compiled", "eager"),
    "transformers": ("grouped_mm", "eager", "batched_mm"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """An engine, its variant, and the interpreter that has it installed."""

    engine: str
    variant: str = ""
    python: str = sys.executable

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.variant}" if self.variant else self.engine


def parse_peer(text: str) -> Entrant:
    """`NAME[/VARIANT][=PYTHON]`. Raises what argparse turns into a message."""
    name, _, python = text.partition("=")
    engine, _, variant = name.partition("/")
    if engine not in VARIANTS:
        raise ArgumentTypeError(f"{engine!r} is none of {', '.join(VARIANTS)}")
    variants = VARIANTS[engine]
    if variant and variant not in variants:
        choices = ", ".join(v for v in variants if v) or "none"
        raise ArgumentTypeError(f"{engine} has no variant {variant!r}: {choices}")
    return Entrant(engine=engine, variant=variant or variants[0], python=python or sys.executable)
