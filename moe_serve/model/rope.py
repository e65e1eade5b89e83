"""Rotary positions (Su et al., RoFormer, 2021) and the ways to stretch them over longer contexts.

P positions, R rotated values of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.interface.attention_shape import RotaryTable
from moe_kernels.reference.norm import rotary_table


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Divides positions by a factor (Chen et al., Position Interpolation, 2023)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Interpolates slow frequencies and keeps fast ones, with a ramp between (Peng et al., YaRN,
    2023).

    `attention_factor` multiplies cosines and sines.
    """

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True  # the ramp's ends are rounded to whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Divides wavelengths above a bound by a factor, with a smooth transition (Llama 3.1, 2024)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


RopeScaling = LinearScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions: angle(position, i) = position * theta^(-2 i / dim), scaled.

    `is_interleaved`: the checkpoint pairs values 2 i and 2 i + 1; the loader reorders its rows, so
    that the kernels only ever pair i and i + dim / 2.
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None
    is_interleaved: bool = False


def make_rotary_table(rope: RopeSpec, num_positions: int, device: torch.device) -> RotaryTable:
    """Returns cos and sin [P, R] in fp32."""
    positions = torch.arange(num_positions).float()
    table = rotary_table(positions[:, None] * inverse_frequencies(rope)[None])
    factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    return RotaryTable((table.cos * factor).to(device), (table.signed_sin * factor).to(device))


def identity_table(dim: int, num_positions: int, device: torch.device) -> RotaryTable:
    """Returns a table that rotates nothing, for layers without positions."""
    shape = (num_positions, dim)
    return RotaryTable(torch.ones(shape, device=device), torch.zeros(shape, device=device))


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """Returns radians per position, [R / 2] in fp32."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case YarnScaling() as yarn:
            return _yarn(frequencies, rope.theta, rope.dim, yarn)
        case Llama3Scaling() as llama3:
            return _llama3(frequencies, llama3)


def _yarn(frequencies: Tensor, theta: float, dim: int, yarn: YarnScaling) -> Tensor:
    def dimension(num_rotations: float) -> float:
        """Returns the dimension that rotates this often within the original context."""
        wavelength = yarn.original_positions / (num_rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high > low else 0.001
    is_slow = ((torch.arange(dim // 2).float() - low) / width).clamp(0, 1)
    is_fast = 1 - is_slow
    return frequencies / yarn.factor * (1 - is_fast) + frequencies * is_fast


def _llama3(frequencies: Tensor, llama3: Llama3Scaling) -> Tensor:
    low, high = llama3.low_frequency_factor, llama3.high_frequency_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (llama3.original_positions / wavelengths - low) / (high - low)
    slow = frequencies / llama3.factor
    between = (1 - smooth) * slow + smooth * frequencies
    is_long = wavelengths > llama3.original_positions / low
    is_short = wavelengths < llama3.original_positions / high
    return torch.where(is_long, slow, torch.where(is_short, frequencies, between))


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Returns the growth of the attention's logits with the context: 0.1 scale ln(factor) + 1
    (YaRN).
    """
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
