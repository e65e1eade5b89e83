"""Reads a published BitDelta file: a dictionary of tensors in torch.save's format, without running
any code of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from moe_serve.errors import CheckpointError
from routing_predictor.torch_files.opcodes import StoredTensor
from routing_predictor.torch_files.torch_file import BFLOAT16, TorchFile, dtype_of
from routing_predictor.traces.routing_error import TorchFileError


class PublishedFile:
    """An open file, whose tensors are read one by one. Raises CheckpointError if the file is not a
    dictionary of tensors."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = TorchFile(path)
        except TorchFileError as error:
            raise CheckpointError(f"{error}.") from None
        try:
            self.tensors: Mapping[str, StoredTensor] = _checked(path, self._file.content)
        except CheckpointError:
            self._file.close()
            raise

    def read(self, name: str) -> Tensor:
        """Reads a tensor into its own memory."""
        stored = self.tensors[name]
        try:
            tensor = torch.from_numpy(self._file.array(stored))
        except TorchFileError as error:
            raise CheckpointError(f"{error} ({name[:200]}).") from None
        return tensor.view(torch.bfloat16) if stored.storage == BFLOAT16 else tensor

    def close(self) -> None:
        self._file.close()


def _checked(path: Path, content: object) -> Mapping[str, StoredTensor]:
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path} is not a dictionary of tensors, as BitDelta files are.")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise CheckpointError(
                f"{path}: the entry {str(name)[:100]!r} is no tensor, and only tensors are read."
            )
        try:
            dtype_of(value)
        except TorchFileError as error:
            raise CheckpointError(f"{path}: {error} ({name[:200]}).") from None
    return content
