"""A checkpoint's files by size and hash: another revision shows, and an unfinished copy too."""

from __future__ import annotations

import json
from pathlib import Path

from moe_serve.cluster.members.preflight import file_marks


def write(folder: Path, values: bytes, config: str = "{}") -> Path:
    folder.mkdir()
    size = len(values)
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + values
    (folder / "model-00001.safetensors").write_bytes(weights)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (folder / "config.json").write_text(config)
    (folder / "README.md").write_text(str(folder))  # not compared
    return folder


def test_the_same_checkpoint_has_the_same_marks(tmp_path: Path) -> None:
    first = file_marks(write(tmp_path / "a", bytes(100_000)))
    assert first == file_marks(write(tmp_path / "b", bytes(100_000)))
    names = ["config.json", "model.safetensors.index.json", "model-00001.safetensors"]
    assert [mark.name for mark in first] == names


def test_what_differs_shows_in_its_file_only(tmp_path: Path) -> None:
    first = file_marks(write(tmp_path / "a", bytes(100_000)))
    others = {
        "config.json": write(tmp_path / "b", bytes(100_000), '{"a": 1}'),
        "model-00001.safetensors": write(tmp_path / "c", b"\1" * 100_000),
    }
    for name, folder in others.items():
        differing = [a.name for a, b in zip(first, file_marks(folder), strict=True) if a != b]
        assert differing == [name]


def test_an_unfinished_copy_differs(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", bytes(100_000))
    first = file_marks(folder)
    weights = folder / "model-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:50_000])
    (folder / "config.json").unlink()
    second = file_marks(folder)
    assert [mark.name for mark in second] == [mark.name for mark in first[1:]]
    assert second[1] != first[2]
    weights.write_bytes(b"")
    assert file_marks(folder)[1].size == 0, "an empty file is no reason to stop"
