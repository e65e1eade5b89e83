"""A quantised checkpoint as it would be published, and the same weights stored in floats."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.families.case import Case
from tests.support.families.expert_layouts import Tensors
from tests.support.families.parity import write_checkpoint
from tests.support.families.stored_forms import Form, StoredMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedCase:
    """A quantised model. `forms`: patterns of module names and how these are stored; the first that
    fits counts.

    `layout` changes the names or shapes that transformers writes into the published ones; `unread`
    are further tensors of the published files. `inside`: the larger model's architecture, whose
    config and names enclose this one's.
    """

    model: Case
    quantization: Mapping[str, Any]
    forms: Mapping[str, Form]
    format_name: str
    layout: Callable[[Tensors], Tensors] = lambda tensors: tensors
    unread: tuple[str, ...] = ()
    inside: str = ""
    must_be_stored: tuple[str, ...] = field(default=("experts",))


def write_pair(root: Path, case: QuantisedCase) -> tuple[Path, Path]:
    """Writes the quantised folder and its twin in float32, and returns both."""
    plain = write_checkpoint(root / "plain", case.model)
    stored = Path(shutil.copytree(plain, root / "stored"))
    torch.manual_seed(0)
    floats = case.layout(load_file(plain / "model.safetensors"))
    if case.inside:
        floats = {f"language_model.{name}": tensor for name, tensor in floats.items()}
    packed = dict(floats)
    for name, tensor in floats.items():
        form = _form_of(name, case.forms)
        if form is None or tensor.dim() < 2:
            continue
        matrix = _stored(form, tensor)
        stem, has_weight = name.removesuffix("weight"), name.endswith(".weight")
        del packed[name]
        for part, value in matrix.parts.items():  # fused experts have no ".weight"
            packed[stem + (part if has_weight else part.removeprefix("weight"))] = value
        floats[name] = matrix.weight_NK
    for kind in case.must_be_stored:
        assert any(kind in n for n in packed.keys() - floats.keys()), f"no {kind} in few bits"
    packed |= {name: torch.full((3,), torch.nan) for name in case.unread}
    save_file(floats, plain / "model.safetensors", {"format": "pt"})
    save_file(packed, stored / "model.safetensors", {"format": "pt"})
    _write_config(plain, case, None)
    _write_config(stored, case, case.quantization)
    return stored, plain


def _form_of(name: str, forms: Mapping[str, Form]) -> Form | None:
    module = name.removesuffix(".weight")
    return next((form for pattern, form in forms.items() if re.fullmatch(pattern, module)), None)


def _stored(form: Form, tensor: Tensor) -> StoredMatrix:
    """Stores each of the fused experts by itself, and then joins them."""
    if tensor.dim() == 2:
        return form(*tensor.shape)
    matrices = [form(*tensor.shape[1:]) for _ in range(len(tensor))]
    parts = {part: torch.stack([m.parts[part] for m in matrices]) for part in matrices[0].parts}
    return StoredMatrix(parts, torch.stack([m.weight_NK for m in matrices]))


def _write_config(
    folder: Path, case: QuantisedCase, quantization: Mapping[str, Any] | None
) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    if quantization is not None:
        values["quantization_config"] = quantization
    if case.inside:
        values = {"architectures": [case.inside], "text_config": values, "vision_config": {}}
    path.write_text(json.dumps(values))
