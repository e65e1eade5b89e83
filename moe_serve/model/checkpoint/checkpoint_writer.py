"""Writes a checkpoint folder in Hugging Face layout; an unfinished one never loads.

Everything is written into `.NAME.partial` beside the folder `NAME`. When it is complete it is
renamed, and `config.json`, without which nothing loads, gets its name last. A process that is
killed leaves at most a folder without `config.json`; the next one that writes the same folder
removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from torch import Tensor

from moe_serve.errors import ConfigError
from moe_serve.model.checkpoint.safetensors_writer import PlannedTensor, SafetensorsWriter

_SHARD_BYTES = 2 * 2**30
_SPARE_BYTES = 64 * 2**20  # for headers, the tokenizer and the file system
_UNNAMED_CONFIG = "config.json.partial"
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_NOT_COPIED = ("config.json", "model.safetensors.index.json")


class CheckpointWriter:
    """Writes the planned tensors into shards. A context manager: leaving it before `finish` removes
    what was written.
    """

    def __init__(
        self, folder: Path, plan: Sequence[PlannedTensor], *, shard_bytes: int = _SHARD_BYTES
    ) -> None:
        """Raises ConfigError if the folder exists, or if the disk has too little room."""
        self._folder = folder.absolute()
        self._partial = self._folder.with_name(f".{self._folder.name}.partial")
        self._num_bytes = sum(tensor.nbytes for tensor in plan)
        self._num_written = 0
        self._is_finished = False
        check_target(folder)
        self._lock = self._claim()
        try:
            self._check_room()
            self._files = _file_names(_into_shards(plan, shard_bytes))
            self._file_of = {tensor.name: name for name, ts in self._files.items() for tensor in ts}
            self._writers: dict[str, SafetensorsWriter] = {}
            self._missing = {name: len(tensors) for name, tensors in self._files.items()}
        except BaseException:
            self._remove()
            raise

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_finished:
            for writer in self._writers.values():
                writer.close()
            self._remove()
        if isinstance(error, OSError):
            raise self._not_written(error) from error

    def write(self, name: str, pieces: Iterable[Tensor]) -> None:
        """Writes one planned tensor, in pieces that follow one another; any order of tensors."""
        file = self._file_of.pop(name)
        if file not in self._writers:
            self._writers[file] = SafetensorsWriter(self._partial / file, self._files[file])
        self._writers[file].write(name, self._counted(pieces))
        self._missing[file] -= 1
        if not self._missing[file]:
            self._writers[file].finish()

    def finish(self, config: Mapping[str, object], files: Mapping[str, bytes]) -> None:
        """Writes the index, other files and the config, and gives the folder its name."""
        assert not self._file_of, f"{len(self._file_of)} tensors are missing"
        if len(self._files) > 1:
            shards = {tensor.name: name for name, ts in self._files.items() for tensor in ts}
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": shards}
            files = {**files, "model.safetensors.index.json": _json(index)}
        for name, content in files.items():
            _write_through(self._partial / name, content)
        _write_through(self._partial / _UNNAMED_CONFIG, _json(config))
        if self._folder.exists():
            shutil.rmtree(self._folder)  # `check_target` found it to be left from a killed process
        (self._partial / "lock").unlink()
        self._partial.rename(self._folder)
        _sync_folder(self._folder.parent)
        (self._folder / _UNNAMED_CONFIG).rename(self._folder / "config.json")
        _sync_folder(self._folder)
        self._is_finished = True
        self._lock.close()

    def _counted(self, pieces: Iterable[Tensor]) -> Iterable[Tensor]:
        for piece in pieces:
            yield piece
            self._num_written += piece.nbytes

    def _claim(self) -> BinaryIO:
        """Makes the partial folder, empty, with a lock that lasts as long as this process."""
        try:
            self._partial.mkdir(exist_ok=True)
            lock = (self._partial / "lock").open("wb")
        except OSError as error:
            raise ConfigError(f"{self._folder} cannot be written: {error.strerror}.") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ConfigError(
                f"{self._folder} is being written by another process ({self._partial} is locked): "
                "wait for it, or name another folder."
            ) from None
        for old in self._partial.iterdir():
            if old.name != "lock":
                old.unlink()
        return lock

    def _check_room(self) -> None:
        free = shutil.disk_usage(self._partial).free
        if free < self._num_bytes + _SPARE_BYTES:
            raise ConfigError(
                f"{self._folder} needs {_gigabytes(self._num_bytes + _SPARE_BYTES)}, but the disk "
                f"has {_gigabytes(free)} free: free some, or name a folder on another disk."
            )

    def _remove(self) -> None:
        self._lock.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def _not_written(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self._folder} cannot be written: {error.strerror or error}, after "
            f"{_gigabytes(self._num_written)} of {_gigabytes(self._num_bytes)}; nothing was kept."
        )


def check_target(folder: Path) -> None:
    """Raises ConfigError unless a new folder can be made there. The remains of a killed writer do
    not count.
    """
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{folder} cannot be written: {parent} is not a folder.")
    is_left_over = (folder / _UNNAMED_CONFIG).is_file() and not (folder / "config.json").exists()
    if (folder.exists() or folder.is_symlink()) and not is_left_over:
        raise ConfigError(f"{folder} exists: name another folder, or remove it.")


def files_beside(folder: Path) -> dict[str, bytes]:
    """Returns the tokenizer, templates and other small files beside the weights."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in _COPIED and path.name not in _NOT_COPIED
    }


def _into_shards(plan: Sequence[PlannedTensor], most: int) -> list[list[PlannedTensor]]:
    """Groups tensors in order into shards of at most `most` bytes. A larger tensor has its own
    shard.
    """
    shards: list[list[PlannedTensor]] = [[]]
    room = most
    for tensor in plan:
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def _file_names(shards: Sequence[Sequence[PlannedTensor]]) -> dict[str, Sequence[PlannedTensor]]:
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {
        f"model-{number:05}-of-{len(shards):05}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }


def _json(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write_through(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
