"""Rules for all formats: plain tensors stay plain, threads may read, unknown formats are
refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint import safetensors_file
from moe_serve.model.checkpoint.checkpoint import Checkpoint
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.formats import FORMATS
from moe_serve.model.load.weight_reader import WeightReader

ReaderOf = Callable[..., WeightReader]
SCHEME = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"bits": 4},
    "compressed-tensors": {"format": "int-quantized", "config_groups": {"a": SCHEME}},
    "fp8": {"weight_block_size": [128, 128]},
    "gptq": {"bits": 4},
    "mxfp4": {},
}


@pytest.mark.parametrize("method", [None, *sorted(FORMATS)])
def test_floats_are_read_as_they_are(reader_of: ReaderOf, method: str | None) -> None:
    """This holds in a quantised checkpoint too: norms, routers, heads, and modules that were left
    out."""
    router, fused = torch.randn(4, 8).bfloat16(), torch.randn(3, 8, 6).half()
    quantization = None if method is None else CONFIGS[method] | {"quant_method": method}
    reader = reader_of({"gate.weight": router, "experts.up": fused}, quantization)
    assert reader.has("gate.weight") and not reader.has("gate.bias")
    reader.expect("gate.weight", (4, 8))
    reader.expect("experts.up", (3, 8, 6))
    assert torch.equal(reader.read("gate.weight", (4, 8), torch.bfloat16), router)
    assert torch.equal(reader.read("gate.weight", (4, 8), torch.float32), router.float())
    one = reader.read("experts.up", (3, 8, 6), torch.float32, expert=1)
    assert torch.equal(one, fused[1].float())
    same = reader.read("experts.up", (3, 8, 6), torch.float16)
    reader.done("experts.up", expert=1)
    reader.done("experts.up")
    assert torch.equal(same, fused), "the pages are read again where somebody still looks"
    with pytest.raises(CheckpointError, match=r"gate\.weight has shape \[4, 8\], but config.json"):
        reader.expect("gate.weight", (8, 4))
    with pytest.raises(CheckpointError, match=r"tensor gate\.bias is missing; its module has we"):
        reader.expect("gate.bias", (4,))


@pytest.mark.parametrize("method", ["bitsandbytes", "modelopt", None, ["gptq"]])
def test_strangers_are_refused(reader_of: ReaderOf, method: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        reader_of({"a": torch.zeros(1)}, {"quant_method": method, "load_in_4bit": True})
    assert str(caught.value) == (
        f"config.json: quantization_config: quant_method is {method!r}, which is not served; "
        "served: awq, compressed-tensors, fp8, gptq, mxfp4, and plain floats."
    )


def test_packed_parts_without_a_config_are_named(reader_of: ReaderOf) -> None:
    tensors = {"m.qweight": torch.zeros(1), "m.qzeros": torch.zeros(1), "m.scales": torch.zeros(1)}
    with pytest.raises(
        CheckpointError, match=r"m\.weight is missing; its module has qweight, qzeros, scales"
    ):
        reader_of(tensors).expect("m.weight", (8, 8))


@pytest.mark.parametrize("where", ["top", "text_config"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_the_config_may_be_in_the_text_part(tmp_path: Path, where: str, key: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    part = {key: {"quant_method": "mxfp4"}}
    values = part if where == "top" else {"quantization_config": None, "text_config": part}
    reader = WeightReader(Checkpoint(tmp_path), HFConfig(values, "config.json"))
    assert reader.format_name == "mxfp4"


def test_a_config_that_is_no_object(reader_of: ReaderOf, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="quantization_config must be an object"):
        WeightReader(Checkpoint(tmp_path), HFConfig({"quantization_config": 4}, "config.json"))


def test_the_choice_is_logged(
    reader_of: ReaderOf, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.INFO):
        reader_of({"a": torch.zeros(1)}, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    assert caplog.messages == [f"{tmp_path}: weights are stored as gptq int4 groups of 32"]


def test_copies_do_not_read_the_headers_again(
    reader_of: ReaderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(4, 3)
    reader = reader_of({"a": weight})
    monkeypatch.setattr(safetensors_file, "_read_headers", lambda path: 1 // 0)
    copied = reader.copying().copying()
    assert torch.equal(copied.read("a", (4, 3), torch.float32), weight)


def test_threads_read_the_same(reader_of: ReaderOf) -> None:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for i in range(16):
        tensors[f"{i}.weight"] = torch.randn(130, 140).to(torch.float8_e4m3fn)
        tensors[f"{i}.weight_scale_inv"] = torch.rand(2, 2)
    quantization = CONFIGS["fp8"] | {"quant_method": "fp8"}

    def read(reader: WeightReader, i: int) -> torch.Tensor:
        return reader.read(f"{i % 16}.weight", (130, 140), torch.bfloat16)

    reader = reader_of(tensors, quantization)
    alone = [read(reader, i) for i in range(16)]
    fresh = reader_of(tensors, quantization)  # nothing mapped yet: threads race for that too
    with ThreadPoolExecutor(8) as pool:
        for i, weight in enumerate(pool.map(lambda i: read(fresh, i), range(64))):
            assert torch.equal(weight, alone[i % 16]), f"tensor {i % 16}"
