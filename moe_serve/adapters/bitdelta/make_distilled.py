"""Makes a BitDelta adapter whose scales are fitted to texts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from moe_serve.adapters.adapter_files import AdapterFiles, open_unchanged
from moe_serve.adapters.bitdelta.distil import (
    Distilled,
    DistilRecipe,
    DistilTexts,
    Progress,
    distil,
)
from moe_serve.adapters.bitdelta.make import ScalesName, make_bitdelta
from moe_serve.adapters.bitdelta.tensors import SCALE, SIGN
from moe_serve.adapters.bitdelta.writer import (
    BitDeltaSize,
    FullEntry,
    SignedEntry,
    Signs,
    check_new,
    write_bitdelta,
)


@dataclass(frozen=True, slots=True)
class DistilledAdapter:
    """The size of the written adapter, and the result of the fit."""

    size: BitDeltaSize
    distilled: Distilled


def make_distilled(
    base: Path,
    tuned: Path,
    out: Path,
    scales: ScalesName,
    texts: DistilTexts,
    recipe: DistilRecipe,
    progress: Progress | None = None,
) -> DistilledAdapter:
    """Writes the adapter of `make_bitdelta` with fitted scales. Both checkpoints must fit
    into memory in fp32. Raises CheckpointError and ConfigError."""
    check_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        first = Path(folder) / "first"
        make_bitdelta(base, tuned, first, scales)
        with open_unchanged(first) as files:
            done = distil(base, tuned, files, texts, recipe, progress)
            notes = {key: str(files.config[key]) for key in ("base", "scales")}
            notes["distilled"] = f"{recipe.num_steps} steps"
            signed, full = _signed(files, done.scales), _full(files)
            return DistilledAdapter(write_bitdelta(out, signed, full, notes), done)


def _signed(files: AdapterFiles, scales: Mapping[str, Tensor]) -> list[SignedEntry]:
    def read(module: str) -> Signs:
        return Signs(files.read(module + SIGN), scales[module])

    return [
        SignedEntry(module, _shape(files, module), len(own), partial(read, module))
        for module, own in scales.items()
    ]


def _shape(files: AdapterFiles, module: str) -> tuple[int, ...]:
    """Returns the shape of a matrix, whose rows may use only a part of their last byte."""
    num_rows, num_bytes = files.shape(module + SIGN)
    return num_rows, num_bytes * 8


def _full(files: AdapterFiles) -> list[FullEntry]:
    names = [name for name, _ in files.headers(bits=SIGN) if not name.endswith((SIGN, SCALE))]
    return [
        FullEntry(name, files.shape(name), files.read(name).dtype, partial(files.read, name))
        for name in names
    ]
