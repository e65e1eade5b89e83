"""Reads the facts of a CUDA device that launches need."""

from __future__ import annotations

import torch
import triton

from moe_kernels.gpu.grouped_gemm.api import Chip
from moe_kernels.gpu.tuned import load_tuned

_KNOWN = (100, 90, 80)  # what the heuristics have configurations for
_FIRST_WITH_FP8 = 89


def chip_of(device: torch.device, has_equal_tiles: bool = False) -> Chip:
    """The device's chip, with what was tuned for it. See self_check.py for `has_equal_tiles`."""
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    return Chip(
        capability=known_capability(capability),
        num_processors=properties.multi_processor_count,
        has_equal_tiles=has_equal_tiles,
        has_fp8=capability >= _FIRST_WITH_FP8,
        tuned=load_tuned(properties.name, triton.__version__),
    )


def known_capability(capability: int) -> int:
    """The newest that the heuristics know and that is not newer than this one: 89 -> 80."""
    assert capability >= _KNOWN[-1], f"sm_{capability} is older than sm_{_KNOWN[-1]}"
    return next(known for known in _KNOWN if known <= capability)
