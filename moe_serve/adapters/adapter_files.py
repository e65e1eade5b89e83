"""The files of an adapter's folder: their digest, and their tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.safetensors_file import SafetensorsFile
from moe_serve.regular_file import is_there, regular_file

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ESFT_CONFIG = "expert_cfg.json"
BITDELTA_CONFIG = "bitdelta_config.json"
_MAX_CONFIG_BYTES = 2**20
_BLOCK_BYTES = 2**20
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """A folder with one configuration and its weight files."""

    folder: Path
    config_name: str
    config: Mapping[str, Any]
    weights: tuple[SafetensorsFile, ...]
    digest: bytes

    @property
    def is_lora(self) -> bool:
        return self.config_name == PEFT_CONFIG

    @property
    def is_bitdelta(self) -> bool:
        return self.config_name == BITDELTA_CONFIG

    @property
    def config_path(self) -> Path:
        return self.folder / self.config_name

    def headers(self, bits: str | None = None) -> Iterator[tuple[str, str]]:
        """Yields the names of all tensors, each with the words that name its file and itself.
        `bits`: the ending of names whose tensors are bytes, in place of floats."""
        for file in self.weights:
            for name, header in file.headers.items():
                where = f"{file.path}: tensor {name[:200]}"
                dtypes = ("U8",) if bits is not None and name.endswith(bits) else _FLOATS
                if header.dtype not in dtypes:
                    raise CheckpointError(
                        f"{where} is {header.dtype}: it must be one of {', '.join(dtypes)}."
                    )
                yield name, where

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self._file(name).headers[name].shape

    def read(self, name: str) -> Tensor:
        """Reads a tensor into its own memory, as it is stored."""
        return self._file(name).copy(name)

    def close(self) -> None:
        """Closes all files."""
        for file in self.weights:
            file.close()

    def _file(self, name: str) -> SafetensorsFile:
        return next(file for file in self.weights if name in file.headers)


def open_adapter(folder: Path) -> AdapterFiles:
    """Reads the configuration and the headers of an adapter. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give the folder of an adapter.")
    configs = (PEFT_CONFIG, ESFT_CONFIG, BITDELTA_CONFIG)
    found = [name for name in configs if is_there(folder / name)]
    if len(found) != 1:
        has = f"both {' and '.join(found[:2])}" if found else "no configuration"
        raise CheckpointError(
            f"{folder} has {has}: an adapter has exactly one of {', '.join(configs)}."
        )
    (config_name,) = found
    try:
        paths = weight_files(folder, config_name)
        text = regular_file(folder / config_name).read_bytes()[: _MAX_CONFIG_BYTES + 1]
        digest = _digest(config_name, text, paths)
    except OSError as error:
        where = error.filename or folder
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}.") from None
    return AdapterFiles(
        folder=folder,
        config_name=config_name,
        config=_parsed(folder / config_name, text),
        weights=_opened(paths),
        digest=digest,
    )


@contextmanager
def open_unchanged(folder: Path, digest: bytes | None = None) -> Iterator[AdapterFiles]:
    """Opens an adapter to read its weights. Raises CheckpointError if its content is not that of
    the digest, and at the end if it changed meanwhile."""
    files = open_adapter(folder)
    try:
        if digest not in (None, files.digest):
            raise CheckpointError(
                f"{folder} has changed since it was loaded: load it again under its name."
            )
        yield files
        after = open_adapter(folder)
        after.close()
        if after.digest != files.digest:
            raise CheckpointError(f"{folder} changed while it was read: load it again.")
    finally:
        files.close()


def weight_files(folder: Path, config_name: str) -> list[Path]:
    """Returns the weight files of an adapter. Raises CheckpointError."""
    if config_name != PEFT_CONFIG:
        paths = sorted(folder.glob("*.safetensors"))
    else:
        paths = [folder / PEFT_WEIGHTS] if is_there(folder / PEFT_WEIGHTS) else []
    if paths:
        return [regular_file(path) for path in paths]
    pickles = [path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"))]
    if pickles:
        raise CheckpointError(
            f"{folder / sorted(pickles)[0]} is a pickle, which can run code and is never opened: "
            "save the adapter as safetensors."
        )
    wanted = PEFT_WEIGHTS if config_name == PEFT_CONFIG else "*.safetensors"
    raise CheckpointError(f"{folder} has no {wanted}: an adapter needs its weights.")


def _digest(config_name: str, text: bytes, paths: list[Path]) -> bytes:
    """Returns the SHA-256 of names, lengths and all bytes."""
    digest = sha256(f"{config_name}:{len(text)}:".encode() + text)
    for path in paths:
        with path.open("rb") as file:
            digest.update(f"{path.name}:{path.stat().st_size}:".encode())
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.digest()


def _parsed(path: Path, text: bytes) -> Mapping[str, Any]:
    if len(text) > _MAX_CONFIG_BYTES:
        raise CheckpointError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes.")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must be a JSON object.")
    return config


def _opened(paths: list[Path]) -> tuple[SafetensorsFile, ...]:
    files = tuple(SafetensorsFile(path) for path in paths)
    names: set[str] = set()
    for file in files:
        twice = sorted(names & file.headers.keys())
        if twice:
            raise CheckpointError(f"{file.path}: tensor {twice[0]} is in another file, too.")
        names |= file.headers.keys()
    return files
