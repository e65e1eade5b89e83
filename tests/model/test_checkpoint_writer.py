"""The writer of checkpoint folders: a written folder reads back, an unfinished one never loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_serve.errors import ConfigError
from moe_serve.model.checkpoint.checkpoint import Checkpoint
from moe_serve.model.checkpoint.checkpoint_writer import CheckpointWriter
from moe_serve.model.checkpoint.safetensors_writer import PlannedTensor

_TENSORS: dict[str, Tensor] = {
    "bytes": torch.arange(7, dtype=torch.uint8),
    "floats": torch.arange(6, dtype=torch.float32).view(2, 3),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4, dtype=torch.int32),
    "number": torch.tensor(9, dtype=torch.int64),
}
_PLAN = [PlannedTensor(name, t.dtype, tuple(t.shape)) for name, t in _TENSORS.items()]


def _write_all(writer: CheckpointWriter) -> None:
    for name, tensor in reversed(_TENSORS.items()):
        flat = tensor.flatten()
        writer.write(name, (flat[:1], flat[1:]))


@pytest.mark.parametrize("shard_bytes", [10**6, 20])
def test_tensors_are_read_back(tmp_path: Path, shard_bytes: int) -> None:
    folder = tmp_path / "model"
    with CheckpointWriter(folder, _PLAN, shard_bytes=shard_bytes) as writer:
        _write_all(writer)
        writer.finish({"a": 1}, {"tokenizer.json": b"{}"})
    checkpoint = Checkpoint(folder)
    for name, tensor in _TENSORS.items():
        found = checkpoint.view(name)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert json.loads((folder / "config.json").read_text()) == {"a": 1}
    files = sorted(folder.glob("*.safetensors"))
    theirs = {name: t for file in files for name, t in load_file(file).items()}
    assert theirs.keys() == _TENSORS.keys()
    if shard_bytes == 20:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in _TENSORS.values())
        assert len(files) == len(set(index["weight_map"].values())) > 1


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "model", _PLAN) as writer:
        writer.write("bytes", [_TENSORS["bytes"]])
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_with_numbers(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="No space left on device, after 0.0 GB of 0.0 GB"),
        CheckpointWriter(tmp_path / "model", _PLAN) as writer,
    ):
        writer.write("bytes", [_TENSORS["bytes"]])
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_too_small_a_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    huge = [PlannedTensor("huge", torch.uint8, (10**18,))]
    with pytest.raises(ConfigError, match="needs 1000000000.1 GB, but the disk has"):
        CheckpointWriter(tmp_path / "model", huge)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="model exists: name another folder, or remove it"):
        CheckpointWriter(tmp_path / "model", _PLAN)
    with pytest.raises(ConfigError, match="is not a folder"):
        CheckpointWriter(tmp_path / "no" / "model", _PLAN)


def test_two_writers_of_one_folder_do_not_meet(tmp_path: Path) -> None:
    with (
        CheckpointWriter(tmp_path / "model", _PLAN),
        pytest.raises(ConfigError, match="is being written by another process"),
    ):
        CheckpointWriter(tmp_path / "model", _PLAN)


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / ".model.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json.partial").write_text("{}")
    with CheckpointWriter(tmp_path / "model", _PLAN) as writer:
        _write_all(writer)
        writer.finish({}, {})
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
