"""The engines to measure: moe-serve in each format of its experts, and those of transformers."""

from __future__ import annotations

from gpu_bench.job import OWN, PEER, Entrant

BASE = "moe-serve"  # whose answers the others' are compared with
ENTRANTS = (
    Entrant(name=BASE, engine=OWN),
    Entrant(name="transformers grouped_mm compiled", engine=PEER, experts="grouped_mm"),
    Entrant(name="moe-serve, no graphs", engine=OWN, is_captured=False),
    Entrant(name="moe-serve fp8", engine=OWN, weights="fp8"),
    Entrant(name="moe-serve int4", engine=OWN, weights="int4"),
    Entrant(name="transformers grouped_mm", engine=PEER, experts="grouped_mm", is_captured=False),
    # Gathers the weights of every row's experts: prompts of many streams may not fit.
    Entrant(name="transformers batched_mm compiled", engine=PEER, experts="batched_mm"),
    Entrant(name="moe-serve int8", engine=OWN, weights="int8"),
    Entrant(name="moe-serve mxfp4", engine=OWN, weights="mxfp4"),
)  # the most telling first: a run may be cut
ALL = tuple(entrant.name for entrant in ENTRANTS)
DEFAULT = tuple(name for name in ALL if name not in ("moe-serve int8", "moe-serve mxfp4"))


def entrant_of(name: str) -> Entrant:
    return next(entrant for entrant in ENTRANTS if entrant.name == name)
