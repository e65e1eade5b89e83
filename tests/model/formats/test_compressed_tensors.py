"""compressed-tensors: the packing of `pack_to_int32`, done here value by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_serve.errors import CheckpointError
from moe_serve.model.load.weight_reader import WeightReader
from tests.support.model.packing import pack_offset

ReaderOf = Callable[..., WeightReader]


def config(layout: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """Returns one group for all Linear modules but the head."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"} | weights}
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


INT4_GROUPS = {"strategy": "group", "group_size": 16, "symmetric": True}


def packed(values: torch.Tensor, scale: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    return {
        "m.weight_packed": pack_offset(values, bits),
        "m.weight_scale": scale,
        "m.weight_shape": torch.tensor(values.shape),
    }


def random_values(num_rows: int, num_columns: int, bits: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (num_rows, num_columns))


def test_a_word_by_hand(reader_of: ReaderOf) -> None:
    # 0xF8 is the pair (8, 15) of offset values, that is 0 and 7; the rest stands for -8.
    tensors = {
        "m.weight_packed": torch.tensor([[0x000000F8]], dtype=torch.int32),
        "m.weight_scale": torch.tensor([[0.5]], dtype=torch.bfloat16),
        "m.weight_shape": torch.tensor([1, 5]),
    }
    reader = reader_of(tensors, config(strategy="channel"))
    reader.expect("m.weight", (1, 5))
    read = reader.read("m.weight", (1, 5), torch.float32)
    assert read.tolist() == [[0.0, 3.5, -4.0, -4.0, -4.0]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_symmetric_groups(reader_of: ReaderOf, bits: int, dtype: torch.dtype) -> None:
    values, scale = random_values(6, 64, bits), torch.rand(6, 4).to(dtype)
    reader = reader_of(packed(values, scale, bits), config(num_bits=bits, **INT4_GROUPS))
    reader.expect("m.weight", (6, 64))
    assert reader.format_name == f"compressed-tensors int{bits} groups of 16"
    expected = values.to(dtype) * scale.repeat_interleave(16, 1)
    for wanted in (dtype, torch.float32, torch.bfloat16):
        read = reader.read("m.weight", (6, 64), wanted)
        assert torch.equal(read, expected.to(wanted)), f"int{bits} scaled in {dtype} as {wanted}"


@pytest.mark.parametrize("num_rows", [16, 11])
@pytest.mark.parametrize("are_zeros_packed", [True, False])
def test_asymmetric_groups(reader_of: ReaderOf, num_rows: int, are_zeros_packed: bool) -> None:
    values, scale = random_values(num_rows, 32, 4), torch.rand(num_rows, 2).bfloat16()
    zeros = torch.randint(-8, 8, (num_rows, 2))
    stored = pack_offset(zeros.T, 4).T if are_zeros_packed else zeros.to(torch.int8)
    tensors = packed(values, scale, 4) | {"m.weight_zero_point": stored}
    reader = reader_of(tensors, config(**INT4_GROUPS | {"symmetric": False}))
    reader.expect("m.weight", (num_rows, 32))
    difference = (values - zeros.repeat_interleave(16, 1)).bfloat16()
    expected = difference * scale.repeat_interleave(16, 1)
    assert torch.equal(reader.read("m.weight", (num_rows, 32), torch.bfloat16), expected)


def test_groups_by_activation_order(reader_of: ReaderOf) -> None:
    values, scale = random_values(5, 48, 4), torch.rand(5, 3).bfloat16()
    g_idx = (torch.arange(48) // 16)[torch.randperm(48)]
    tensors = packed(values, scale, 4) | {"m.weight_g_idx": g_idx.to(torch.int32)}
    reader = reader_of(tensors, config(actorder="group", **INT4_GROUPS))
    reader.expect("m.weight", (5, 48))
    expected = values.bfloat16() * scale[:, g_idx]
    assert torch.equal(reader.read("m.weight", (5, 48), torch.bfloat16), expected)
    tensors["m.weight_g_idx"] = torch.full((48,), -1, dtype=torch.int32)  # not in use
    expected = values.bfloat16() * scale.repeat_interleave(16, 1)
    read = reader_of(tensors, config(**INT4_GROUPS)).read("m.weight", (5, 48), torch.bfloat16)
    assert torch.equal(read, expected)


@pytest.mark.parametrize("scale_shape", [(), (1,), (7, 1)])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_a_value_to_a_byte(reader_of: ReaderOf, scale_shape: tuple[int, ...], kind: str) -> None:
    torch.manual_seed(0)
    values = torch.randint(-128, 127, (7, 20)).to(torch.int8)
    if kind == "float":
        values = (values * 3.5).to(torch.float8_e4m3fn)
    scale = torch.rand(scale_shape).bfloat16()
    strategy = "channel" if len(scale_shape) == 2 else "tensor"
    layout = f"{kind}-quantized"
    reader = reader_of(
        {"m.weight": values, "m.weight_scale": scale},
        config(layout, num_bits=8, type=kind, strategy=strategy),
    )
    reader.expect("m.weight", (7, 20))
    expected = values.to(torch.bfloat16) * scale
    assert torch.equal(reader.read("m.weight", (7, 20), torch.float32), expected.float())


@pytest.mark.parametrize("kind", ["int", "float"])
def test_blocks(reader_of: ReaderOf, kind: str) -> None:
    torch.manual_seed(0)
    values = torch.randint(-7, 8, (20, 24))
    stored = values.to(torch.int8 if kind == "int" else torch.float8_e4m3fn)
    scale = torch.rand(2, 3)
    reader = reader_of(
        {"m.weight": stored, "m.weight_scale": scale},
        config("naive-quantized", num_bits=8, type=kind, strategy="block", block_structure=[16, 8]),
    )
    reader.expect("m.weight", (20, 24))
    expected = values * scale.repeat_interleave(16, 0)[:20].repeat_interleave(8, 1)
    assert torch.equal(reader.read("m.weight", (20, 24), torch.float32), expected)


def test_an_asymmetric_row(reader_of: ReaderOf) -> None:
    values = random_values(3, 8, 8)
    zeros, scale = torch.tensor([[-128], [3], [127]]), torch.rand(3, 1)
    tensors = {
        "m.weight": values.to(torch.int8),
        "m.weight_scale": scale,
        "m.weight_zero_point": zeros.to(torch.int8),
    }
    reader = reader_of(
        tensors, config("int-quantized", num_bits=8, strategy="channel", symmetric=False)
    )
    reader.expect("m.weight", (3, 8))
    assert torch.equal(reader.read("m.weight", (3, 8), torch.float32), (values - zeros) * scale)


def test_groups_of_modules(reader_of: ReaderOf) -> None:
    """An exact name wins over a pattern, and a pattern over `Linear`."""

    def group(target: str, bits: int) -> dict[str, Any]:
        return {"targets": [target], "weights": {"num_bits": bits, "strategy": "channel"}}

    groups = {"a": group("Linear", 4), "b": group("re:.*mlp.*", 8), "c": group("x.mlp.up", 4)}
    tensors = {}
    values = {m: random_values(2, 8, b) for m, b in (("y", 4), ("x.mlp.down", 8), ("x.mlp.up", 4))}
    for module, bits in (("y", 4), ("x.mlp.down", 8), ("x.mlp.up", 4)):
        parts = packed(values[module], torch.ones(2, 1), bits)
        tensors |= {name.replace("m.", f"{module}.", 1): part for name, part in parts.items()}
    reader = reader_of(tensors, config() | {"config_groups": groups})
    assert reader.format_name == "compressed-tensors int4 rows and int8 rows"
    for module, expected in values.items():
        reader.expect(f"{module}.weight", (2, 8))
        read = reader.read(f"{module}.weight", (2, 8), torch.float32)
        assert torch.equal(read, expected.float()), module
    with pytest.raises(CheckpointError, match=r"no config_groups entry .* fit tensor y\.weight"):
        reader_of(tensors, config() | {"config_groups": {"b": groups["b"]}}).expect(
            "y.weight", (2, 8)
        )


REFUSED: list[tuple[dict[str, Any], str]] = [
    (config("marlin-24"), "group_0: format is 'marlin-24'; supported are pack-quantized"),
    (config("nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'"),
    (config(num_bits=3), "group_0: weights: num_bits is 3 of 'int'; supported are 4 and 8"),
    (config(num_bits=4, type="float"), "num_bits is 4; only 8"),
    (config(num_bits=8, type="float"), "type is 'float', which pack-quantized does not support"),
    (config(strategy="tensor_group"), "strategy is 'tensor_group'; supported are tensor"),
    (config(strategy="group"), "group_size is missing"),
    (config(strategy="block", block_structure=[1]), "block_structure must be two"),
    (config() | {"config_groups": None}, "config_groups must be an object of objects"),
    (config() | {"config_groups": {"a": {"targets": "Linear", "weights": {}}}}, "targets must be"),
    *(
        (config() | {"config_groups": {"a": {"targets": [target], "weights": {}}}}, "valid pattern")
        for target in ("re:(", "re:" + "(" * 9999, "re:a{99999999999}")
    ),
    (config() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config is not"),
    (config() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not"),
]  # fmt: skip


@pytest.mark.parametrize(("quantization", "complaint"), REFUSED, ids=[r[1][:30] for r in REFUSED])
def test_refused_configs(reader_of: ReaderOf, quantization: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        reader_of({"a": torch.zeros(1)}, quantization)


def test_refused_parts(reader_of: ReaderOf) -> None:
    good = packed(random_values(6, 64, 4), torch.ones(6, 4), 4)
    cases = [
        (good | {"m.weight_packed": good["m.weight_packed"][:, :4]}, r"implies \[6, 8\]"),
        (good | {"m.weight_scale": torch.ones(6, 1)}, r"_scale has shape \[6, 1\], but int4"),
        ({k: v for k, v in good.items() if "shape" not in k}, r"m\.weight_shape is missing"),
        ({"m.weight": torch.zeros(6, 64).to(torch.int16)}, r"m\.weight has dtype I16"),
        ({"m.weight": torch.zeros(6, 64).to(torch.int8)}, r"m\.weight_scale is missing"),
    ]  # fmt: skip
    for tensors, complaint in cases:
        with pytest.raises(CheckpointError, match=complaint):
            reader_of(tensors, config(**INT4_GROUPS)).expect("m.weight", (6, 64))
    with pytest.raises(CheckpointError, match=r"m\.weight_zero_point is missing"):
        reader_of(good, config(**INT4_GROUPS | {"symmetric": False})).expect("m.weight", (6, 64))
    reader = reader_of(good | {"m.weight_shape": torch.tensor([6, 63])}, config(**INT4_GROUPS))
    with pytest.raises(CheckpointError, match=r"m\.weight_shape says \[6, 63\]"):
        reader.read("m.weight", (6, 64), torch.float32)
    g_idx = torch.full((64,), 4, dtype=torch.int32)
    reader = reader_of(good | {"m.weight_g_idx": g_idx}, config(**INT4_GROUPS))
    with pytest.raises(CheckpointError, match="names groups outside the 4 that exist"):
        reader.read("m.weight", (6, 64), torch.float32)


def test_a_zero_outside_its_range(reader_of: ReaderOf) -> None:
    """Kernels that keep weights packed store a zero as a code of the values' own bits."""
    tensors = packed(random_values(4, 32, 4), torch.ones(4, 2), 4)
    tensors["m.weight_zero_point"] = torch.full((4, 2), 8, dtype=torch.int8)
    reader = reader_of(tensors, config(**INT4_GROUPS | {"symmetric": False}))
    with pytest.raises(CheckpointError, match=r"_zero_point has values outside \[-8, 7\]"):
        reader.read("m.weight", (4, 32), torch.float32)
