"""Reading tensors from a folder of safetensors: memory-mapped, only what is asked for.

Before anything is read, `check` holds the names, shapes and dtypes of all wanted tensors against
the files' headers, so that a bad checkpoint is refused before it takes memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_serve.errors import CheckpointError

_FLOAT_DTYPES = ("F32", "F16", "BF16")


class Checkpoint:
    """The tensors of one checkpoint folder. Close it (or use `with`) to drop the mappings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = _index(folder)
        self._open: dict[str, safe_open] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.clear()

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless every tensor is there with its shape and a float dtype."""
        for name, shape in shapes.items():
            header = self._file(name).get_slice(name)
            found = tuple(header.get_shape())
            if found != shape:
                raise CheckpointError(
                    f"{self._path(name)}: tensor {name} has shape {list(found)}, but config.json "
                    f"implies {list(shape)}."
                )
            if header.get_dtype() not in _FLOAT_DTYPES:
                raise CheckpointError(
                    f"{self._path(name)}: tensor {name} has dtype {header.get_dtype()}; supported "
                    f"are {', '.join(_FLOAT_DTYPES)}."
                )

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read one tensor onto the CPU, in `dtype`."""
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor.to(dtype)

    def _path(self, name: str) -> Path:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is missing; the files hold {len(self._file_of)} "
                "tensors."
            )
        return self.folder / self._file_of[name]

    def _file(self, name: str) -> safe_open:
        path = self._path(name)
        if path.name not in self._open:
            self._open[path.name] = _open(path)
        return self._open[path.name]


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the index names it.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}): fetch it again."
        ) from None


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the sharded index or from the files themselves."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        try:
            weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index_path} has no readable weight_map: {error}.") from None
        for file_name in set(weight_map.values()):
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise CheckpointError(f"{index_path} names {file_name!r}, not a file beside it.")
        return dict(weight_map)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(_no_safetensors(folder))
    return {name: path.name for path in files for name in _open(path).keys()}  # noqa: SIM118


def _no_safetensors(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in {".bin", ".pt", ".pth"})
    if pickles:
        return (
            f"{folder} holds {pickles[0]} but no .safetensors file: pickled weights can run code "
            "and are never loaded; convert the checkpoint to safetensors."
        )
    return f"{folder} holds no .safetensors file."
