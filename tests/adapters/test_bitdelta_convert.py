"""A published BitDelta file becomes an adapter with its values, and no code of a file runs."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_serve.adapters.adapter_build import AdapterBuilder
from moe_serve.adapters.adapter_files import open_unchanged
from moe_serve.adapters.adapter_part import AdapterPart
from moe_serve.adapters.bitdelta.convert import convert_bitdelta
from moe_serve.adapters.bitdelta.published_file import PublishedFile
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.errors import CheckpointError
from moe_serve.model.load.loader import ModelLoader
from tests.support.adapters.bitdelta_folders import dense

BASE = Path(__file__).parents[2] / "moe_serve" / "demo_model"  # widths are multiples of 32
MATRICES = {
    "model.layers.0.self_attn.k_proj": (128, 256),
    "model.layers.2.mlp.experts.7.down_proj": (256, 96),
}
NORM = "model.layers.1.input_layernorm.weight"


def differences() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: 0.01 * torch.randn(shape, generator=generator) for name, shape in MATRICES.items()
    }


def published() -> dict[str, Tensor]:
    """Returns what the published tool stores of a fine-tune, by its formulas."""
    norm = torch.full((256,), 1.5, dtype=torch.bfloat16)
    stored: dict[str, Tensor] = {NORM: torch.nn.Parameter(norm)}
    for module, delta in differences().items():
        bits = (delta >= 0).T.reshape(-1, 32, len(delta)).long()
        words = (bits << torch.arange(32)[None, :, None]).sum(dim=1)
        stored[f"{module}.mask"] = words.to(torch.int32)
        stored[f"{module}.coeff"] = torch.nn.Parameter(delta.abs().mean())
    return stored


def test_a_published_file(tmp_path: Path) -> None:
    torch.save(published(), tmp_path / "diff.pt")
    size = convert_bitdelta(tmp_path / "diff.pt", BASE, tmp_path / "bits")
    own = load_file(tmp_path / "bits" / "model.safetensors")
    for module, delta in differences().items():
        found = dense(own[f"{module}.delta_sign"], own[f"{module}.delta_scale"])
        assert torch.equal(found.sign(), torch.where(delta >= 0, 1.0, -1.0).double())
        assert torch.allclose(found.abs(), delta.abs().mean().double(), atol=1e-7)
    assert own[NORM].tolist() == [1.5] * 256
    assert len(own) == 5 and (size.num_matrices, size.num_full) == (2, 1)
    loader = ModelLoader(BASE)
    with open_unchanged(tmp_path / "bits") as files:
        built = AdapterBuilder(loader, AdapterConfig(), AdapterPart(experts={})).build(files)
    assert built.kind == "bitdelta" and built.layers[2].experts is not None


class _Harm:
    """Runs a function when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (self._path,)


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    harm = tmp_path / "harm"
    torch.save({"x": _Harm(harm)}, tmp_path / "diff.pt")
    with pytest.raises(CheckpointError, match=r"it names posix\.mkdir.*nothing was run"):
        PublishedFile(tmp_path / "diff.pt")
    assert not harm.exists()
    torch.save(published() | {"x": _Harm(harm)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="nothing was run"):
        convert_bitdelta(tmp_path / "other.pt", BASE, tmp_path / "bits")
    assert not harm.exists() and not (tmp_path / "bits").exists()


MASK, COEFF = (f"model.layers.0.self_attn.k_proj.{end}" for end in ("mask", "coeff"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({MASK: torch.zeros(8, 64, dtype=torch.int32)}, "needs an IntStorage of"),
        ({MASK: torch.zeros(8, 128)}, "is a FloatStorage of the shape"),
        ({COEFF: torch.zeros(2)}, "must be one finite number"),
        ({COEFF: torch.tensor(torch.inf)}, "must be one finite number"),
        ({"model.other.mask": torch.zeros(1, 1), "model.other.coeff": torch.zeros(1)}, "no matrix"),
        ({"model.other.coeff": torch.zeros(1)}, "has no mask"),
        ({"lm_head.A": torch.zeros(1)}, "is no tensor of the base model that may change"),
        ({NORM: torch.zeros(3)}, "has the shape"),
        ({"step": 3}, "'step' is no tensor"),
    ],
)
def test_other_files_are_refused(change: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    torch.save(published() | change, tmp_path / "diff.pt")
    with pytest.raises(CheckpointError, match=message):
        convert_bitdelta(tmp_path / "diff.pt", BASE, tmp_path / "bits")
    assert not (tmp_path / "bits").exists()


def test_damaged_files(tmp_path: Path) -> None:
    path, other = tmp_path / "diff.pt", tmp_path / "other.pt"
    torch.save(published(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"zip files since version 1\.6"):
        PublishedFile(path)
    torch.save(published(), path)
    with zipfile.ZipFile(path) as whole:
        entries = {name: whole.read(name) for name in whole.namelist()}
    program = next(name for name in entries if name.endswith("data.pkl"))
    for content in (entries[program][:-9], b"\x80\x02q\x00.", b"\x80\x02}u.", b"\x80\x02K", b""):
        with zipfile.ZipFile(other, "w") as damaged:
            damaged.writestr(program, content)
        with pytest.raises(CheckpointError, match="its pickle "):
            PublishedFile(other)
    with zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(program, entries[program])
    with pytest.raises(CheckpointError, match="is compressed"):
        PublishedFile(other)
