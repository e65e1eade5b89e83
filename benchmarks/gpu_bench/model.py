"""The measured models: a config.json in a folder, the sizes derived from it, and random weights,
created on the device tensor by tensor: a model of any size without a checkpoint.

A weight depends only on its name, its shape and the seed, so two engines that request the same
names get the same model. Scales keep activations and logits near 1 at any depth. N outputs, K
inputs.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.model_size import ModelSize
from moe_kernels.interface.quantised_matrix import (
    E2M1,
    E4M3,
    INT8,
    OFFSET4,
    ByteTable,
    MatrixForm,
    QuantisedMatrix,
)
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.manifest import all_tensors
from moe_serve.model.families import family_of
from moe_serve.model.spec import ModelSpec

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "models"
# A Qwen3-MoE that runs anywhere; widths are whole groups of every packed format.
_TINY = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}


def model_names() -> list[str]:
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def write_model(folder: Path, name: str, *, is_tiny: bool) -> None:
    """Writes the config of `configs/models/`; with tiny sizes on request (only Qwen3-MoE)."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    if is_tiny:
        if config["model_type"] != "qwen3_moe":
            raise SystemExit(f"--tiny has sizes for Qwen3-MoE only, and {name} is another family.")
        config |= _TINY
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def read_spec(folder: Path) -> ModelSpec:
    config = HFConfig.read(folder)
    return family_of(config).read_spec(config.text())


def stored_weights(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns every tensor of a checkpoint with this config, experts in the family's first
    layout.
    """
    config = HFConfig.read(folder)
    family = family_of(config)
    names = family.names_in(lambda _: True)
    stored = all_tensors(names, names.experts[0], family.read_spec(config.text()))
    return {item.name: item.shape for item in stored}


def model_size(folder: Path, dtype: str, expert_bits: float | None = None) -> ModelSize:
    """Counts the parameters that a token touches; `expert_bits` is the size of a packed expert
    weight.
    """
    spec = read_spec(folder)
    counts = {"expert": 0, "dense": 0, "head": 0, "embedding": 0}
    for name, shape in stored_weights(folder).items():
        size = 1
        for length in shape:
            size *= length
        counts[_kind(name)] += size
    if spec.is_head_tied:
        counts["head"], counts["embedding"] = counts["embedding"], 0
    attention = spec.layers[0].attention
    return ModelSize(
        num_layers=spec.num_layers,
        num_experts=spec.router.num_experts,
        top_k=spec.router.top_k,
        expert=counts["expert"] // (spec.num_layers * spec.router.num_experts),
        dense=counts["dense"],
        head=counts["head"],
        embedding=counts["embedding"],
        kv_width=spec.kv_values_per_token,
        attention_width=attention.num_heads * attention.head_dim,
        dtype=dtype,
        expert_bits=expert_bits,
    )


def _kind(name: str) -> str:
    if ".experts." in name:
        return "expert"
    if "lm_head." in name:
        return "head"
    return "embedding" if "embed_tokens" in name else "dense"


Shape = tuple[int, ...]
_INTO_RESIDUAL = ("o_proj.", "down_proj", ".w2.")  # what layers add up, so it is kept small
_ZEROS = ("bias", "sinks")
# Standard deviation of random codes: whole numbers of 4 and 8 bits, E2M1.
_INT4_STD, _INT8_STD, _E2M1_STD = 4.61, 73.9, 2.93
_EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFormat:
    """A storage format of the experts' matrices; `bits` is the size of a weight in the kernels."""

    form: MatrixForm
    table: ByteTable
    bits: float


EXPERT_FORMATS: Mapping[str, ExpertFormat] = {
    "fp8": ExpertFormat(
        form=MatrixForm(values="e4m3", group=128, block_rows=128, scales="float32"),
        table=E4M3,
        bits=8.002,
    ),
    "int8": ExpertFormat(form=MatrixForm(values="int8", scales="bfloat16"), table=INT8, bits=8.0),
    "int4": ExpertFormat(
        form=MatrixForm(values="int4", group=128, scales="bfloat16"), table=OFFSET4, bits=4.125
    ),
    "mxfp4": ExpertFormat(
        form=MatrixForm(values="e2m1", group=32, scales="e8m0"), table=E2M1, bits=4.25
    ),
}


class RandomWeights:
    """A WeightSource for `build_engine`: floats drawn in `dtype`, whatever dtype the reader
    requests.

    `expert_format` is the format of the routed experts; "" gives floats for them too.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        num_layers: int,
        expert_format: str = "",
        seed: int = 0,
    ) -> None:
        self._device, self._dtype, self._seed = device, dtype, seed
        self._residual_scale = (2 * num_layers) ** -0.5
        self._format = EXPERT_FORMATS[expert_format] if expert_format else None
        self.format_name = f"random {expert_format or 'floats'}"

    def has(self, name: str) -> bool:
        return True

    def stored_dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def expect(self, name: str, shape: Shape) -> None:
        """Returns True: every tensor exists."""

    def read(
        self, name: str, shape: Shape, dtype: torch.dtype, expert: int | None = None
    ) -> Tensor:
        """Draws a fused weight [E, ...] expert by expert, with the same bits as single draws."""
        if expert is None and len(shape) == 3:
            return torch.stack([self.read(name, shape, dtype, e) for e in range(shape[0])])
        shape = shape if expert is None else shape[1:]
        weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        if "norm" in name and len(shape) == 1:
            weight.fill_(1.0)
        elif any(part in name for part in _ZEROS):
            weight.zero_()
        else:
            generator = self._generator(name, expert)
            weight.normal_(0.0, self._std(name, shape), generator=generator)
        return weight.to(dtype)

    def form(self, name: str, shape: Shape, expert: int | None = None) -> MatrixForm | None:
        is_packed = self._format is not None and ".experts." in name and "bias" not in name
        return self._format.form if is_packed and self._format is not None else None

    def read_packed(self, name: str, shape: Shape, expert: int | None = None) -> QuantisedMatrix:
        """Returns random codes with one scale for all."""
        assert self._format is not None, f"{name} is stored in floats"
        num_rows, num_columns = shape if expert is None else shape[1:]
        form, std = self._format.form, self._std(name, (num_rows, num_columns))
        codes, scale = self._codes(num_rows, num_columns, self._generator(name, expert))
        num_groups = -(-num_columns // form.group) if form.group else 1
        scales_NG = torch.full((num_rows, num_groups), std * scale, device=self._device)
        if form.values == "e2m1":
            scales_NG = torch.round(torch.log2(scales_NG) + _EXPONENT_BIAS).to(torch.uint8)
        elif form.scales == "bfloat16":
            scales_NG = scales_NG.to(torch.bfloat16)
        return QuantisedMatrix(
            form=form,
            table=self._format.table,
            bytes_NB=codes,
            num_columns=num_columns,
            scales_NG=scales_NG,
        )

    def done(self, name: str, expert: int | None = None) -> None:
        """Does nothing: no state is kept."""

    def copying(self) -> RandomWeights:
        return self

    def _codes(
        self, num_rows: int, num_columns: int, generator: torch.Generator
    ) -> tuple[Tensor, float]:
        """Returns bytes [N, B], and the factor that gives their values a standard deviation of
        1.
        """
        assert self._format is not None, "only for packed experts"
        values = self._format.form.values
        if values == "e4m3":  # random bytes would hold NaN
            floats = torch.empty(num_rows, num_columns, device=self._device)
            floats.normal_(generator=generator)
            return floats.to(torch.float8_e4m3fn).view(torch.uint8), 1.0
        size = (num_rows, num_columns if values == "int8" else -(-num_columns // 2))
        codes = torch.empty(size, dtype=torch.uint8, device=self._device)
        codes.random_(0, 256, generator=generator)
        return codes, 1.0 / {"int8": _INT8_STD, "int4": _INT4_STD, "e2m1": _E2M1_STD}[values]

    def _std(self, name: str, shape: Shape) -> float:
        if "embed" in name:
            return 1.0
        scale = self._residual_scale if any(part in name for part in _INTO_RESIDUAL) else 1.0
        return scale / math.sqrt(shape[-1])

    def _generator(self, name: str, expert: int | None) -> torch.Generator:
        place = "" if expert is None else f"#{expert}"
        seed = zlib.crc32(f"{self._seed}:{name}{place}".encode())
        return torch.Generator(self._device).manual_seed(seed)


def random_weights(
    device: torch.device, dtype: torch.dtype, expert_format: str
) -> Callable[[Path, HFConfig], RandomWeights]:
    """Opens random weights for `build_engine`; only the config of the folder is read."""

    def open_weights(folder: Path, config: HFConfig) -> RandomWeights:
        num_layers = config.positive_int("num_hidden_layers", "num_layers")
        return RandomWeights(device, dtype, num_layers, expert_format)

    return open_weights
