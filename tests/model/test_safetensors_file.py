"""One safetensors file: every damage gives one sentence; good files become views of a map."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.safetensors_file import SafetensorsFile


def file_of(header: Any, num_data_bytes: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_data_bytes)


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"a": entry(0, 8, [2]), "b": entry(8, 16, [1, 2])}
BROKEN: list[tuple[str, bytes, str]] = [
    ("empty", b"", r"it has 0 bytes"),
    ("short", b"\x10\0\0", r"it has 3 bytes"),
    ("header cut", file_of(GOOD)[:30], r"its header has \d+ bytes, but only 22 follow"),
    ("header huge", (2**60).to_bytes(8, "little") + b"{}", f"its header would be {2**60} bytes"),
    ("web page", b"<!DOCTYPE html><html>", r"its header would be \d+ bytes long"),
    ("no JSON", file_of(b"\x80not JSON"), "its header is not JSON"),
    ("deep JSON", file_of(b'{"a":' * 100_000), "its header is not JSON"),
    ("no object", file_of(b"[]"), "its header is not a JSON object"),
    ("twice", file_of(b'{"a":{}, "a":{}}'), "'a' occurs twice"),
    ("data cut", file_of(GOOD, 15), r"tensor b would end at byte \d+, but it has \d+ bytes"),
    ("data over", file_of(GOOD, 17), r"its tensors end at byte \d+, but it has \d+ bytes"),
    ("overlap", file_of(GOOD | {"b": entry(4, 12, [2])}, 12), "tensor b overlaps the one before"),
    ("hole", file_of(GOOD | {"b": entry(12, 20, [2])}, 20), "tensor b leaves a hole before"),
    ("size", file_of({"a": entry(0, 8, [3])}, 8), r"tensor a \(F32 \[3\]\) needs 12 bytes, has 8"),
    ("back", file_of({"a": entry(8, 0, [2])}, 8), r"tensor a .* needs 8 bytes, has -8"),
    ("negative", file_of({"a": entry(-8, 0, [2])}, 8), r"tensor a has .* and offsets \[-8"),
    ("bool", file_of({"a": entry(0, 4, [True])}, 4), r"tensor a has shape \[True\]"),
    ("large", file_of({"a": entry(0, 8, [2**62, 4])}, 8), "tensor a .* needs 73786976294838206464"),
    ("dtype", file_of({"a": entry(0, 8, [2], "F31")}, 8), "tensor a has dtype 'F31', which the"),
    ("dtype no text", file_of({"a": entry(0, 8, [2]) | {"dtype": ["F32"]}}, 8),
     r"tensor a has dtype \['F32'\], which the"),
    ("no entry", file_of({"a": 3}), "tensor a has no dtype, shape and two data_offsets"),
    ("no offsets", file_of({"a": {"dtype": "F32", "shape": []}}), "tensor a has no dtype, shape"),
    ("no shape", file_of({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, 8),
     "tensor a has shape 2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "complaint"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN]
)
def test_broken(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safe.*fetch it"):
        SafetensorsFile(path)
    with pytest.raises(CheckpointError, match=complaint):
        SafetensorsFile(path)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_takes_nothing_that_the_library_refuses(tmp_path: Path, data: st.DataObject) -> None:
    """Files with a changed byte, and cut files, are accepted only if the library accepts them."""
    content = bytearray(save({"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.int8)}))
    header_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzzed.safetensors"
    path.write_bytes(content[: data.draw(st.integers(len(content) - 3, len(content)))])
    try:
        SafetensorsFile(path)
    except CheckpointError:
        return
    try:
        with safe_open(path, framework="pt") as library:
            names = set(library.keys())
    except SafetensorError as error:
        pytest.fail(f"the library refuses it: {error}")
    assert names == set(SafetensorsFile(path).headers)


@pytest.fixture()
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "experts": torch.randn(4, 70, 50),
        "fp8": torch.randn(5, 3).to(torch.float8_e4m3fn),
        "half": torch.randn(7).bfloat16(),
        "nothing": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }


def test_views_are_what_was_saved(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for name, saved in tensors.items():
        read = file.view(name)
        assert read.dtype == saved.dtype and read.shape == saved.shape, name
        assert torch.equal(read.float(), saved.float()), name
        file.drop(name)
        assert torch.equal(read.float(), saved.float()), f"{name} is gone after its pages"
    for expert in range(4):
        assert torch.equal(file.view("experts", expert), tensors["experts"][expert])
        file.drop("experts", expert)
    whole = file.view("experts")
    assert whole.data_ptr() == file.view("experts").data_ptr(), "a view is a copy"
    file.close()
    assert torch.equal(whole, tensors["experts"]), "a view died with its file"


def test_tensors_at_odd_places(tmp_path: Path) -> None:
    """The format allows any order, so a float behind three bytes starts at an odd offset."""
    header = {"a": entry(0, 3, [3], "U8"), "b": entry(3, 11, [2])}
    values = torch.tensor([1.5, -2.0])
    content = file_of(header) + b"\1\2\3" + values.numpy().tobytes()
    (tmp_path / "a.safetensors").write_bytes(content)
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert torch.equal(file.view("b"), values)
    assert file.view("a").tolist() == [1, 2, 3]


def test_a_dtype_without_a_tensor(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(file_of({"a": entry(0, 2, [4], "F4")}, 2))
    file = SafetensorsFile(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="tensor a has dtype F4, which is not served"):
        file.view("a")


def test_works_where_pages_cannot_be_dropped(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.delattr(mmap, "MADV_DONTNEED", raising=False)
    save_file(tensors, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert torch.equal(file.view("experts"), tensors["experts"])
    file.drop("experts")
    assert torch.equal(file.view("experts"), tensors["experts"])


def test_the_file_is_never_written(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "a.safetensors"
    save_file(tensors, path)
    before = path.read_bytes()
    SafetensorsFile(path).view("experts").zero_()
    assert path.read_bytes() == before


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing: fetch it"):
        SafetensorsFile(path)
    path.symlink_to(tmp_path / "blobs" / "0a1b")
    with pytest.raises(CheckpointError, match=r"is missing \(a link to nothing\)"):
        SafetensorsFile(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        SafetensorsFile(path)
    path.rmdir()
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CheckpointError, match="is a Git LFS pointer, .* run `git lfs pull`"):
        SafetensorsFile(path)

    def refuse(self: Path, *args: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        SafetensorsFile(path)
