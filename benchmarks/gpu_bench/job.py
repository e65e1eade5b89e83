"""The job of a worker and its outcome, one JSON object each in files, and the engines to measure:
moe-serve in each format of its experts, and those of transformers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness.work import Work

OWN, PEER = "moe-serve", "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One engine with one setting.

    `weights` is the format of moe-serve's experts, "" for the model's dtype. `experts` is the
    implementation of transformers. `is_captured` requests CUDA graphs, or torch.compile.
    """

    name: str
    engine: str
    weights: str = ""
    experts: str = ""
    is_captured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The work for one entrant; `folder` contains only a config.json."""

    entrant: Entrant
    folder: str
    device: str
    dtype: str
    vocab_size: int
    num_bytes: float  # of all weights, to refuse a device that is too small
    max_batched_tokens: int
    work: Work

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        values = json.loads(path.read_text("utf-8"))
        entrant, work = Entrant(**values.pop("entrant")), Work(**values.pop("work"))
        return cls(entrant=entrant, work=work, **values)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The results of an entrant so far, written after each kind of work.

    `failures` has the reasons by kind of work. `error` is the reason why there are no results, or
    no more.
    """

    facts: dict[str, str] = field(default_factory=dict)
    load_s: float = 0.0
    peak_bytes: int = 0
    samples_s: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)  # of the first round of "single"
    error: str = ""
    is_done: bool = False

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, path: Path) -> Outcome:
        return cls(**json.loads(path.read_text("utf-8")))


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
