"""The job of a worker and its outcome: one JSON object each, in files."""

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
