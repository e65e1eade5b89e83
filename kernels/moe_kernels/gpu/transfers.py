"""Many small arrays in one copy, to the device and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes: what kernels are compiled for


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device, views of one buffer. Does not wait for the device."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    # A pinned block is not used again before the copy from it has ended.
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = packed.numpy()
    for array, start in zip(arrays, starts, strict=True):
        view[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    buffer = packed.to(device, non_blocking=True)
    return [
        buffer[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def download(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """The tensors as arrays, in one copy. Waits until the device has computed them.

    The widest dtypes come first, so that all parts of the buffer are aligned.
    """
    widths = [tensor.element_size() for tensor in tensors]
    assert widths == sorted(widths, reverse=True), f"elements of {widths} bytes, not descending"
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    buffer = torch.cat(flat).cpu()
    arrays, start = [], 0
    for tensor, part in zip(tensors, flat, strict=True):
        piece = buffer[start : start + len(part)].view(tensor.dtype)
        arrays.append(piece.view(tensor.shape).numpy())
        start += len(part)
    return arrays
