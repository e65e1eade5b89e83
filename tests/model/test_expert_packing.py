"""The weights that stay packed, those that do not, and the summary of both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_kernels.interface.quantised_matrix import MatrixForm, PackedLayout
from moe_kernels.reference.torch_kernels import TorchKernels
from moe_serve.config.sections import WeightsName
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.errors import ConfigError
from moe_serve.model.checkpoint.manifest import Stored
from moe_serve.model.load.expert_packing import BankForms, ExpertPacking, StoredProduct
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.load.weight_reader import WeightReader
from moe_serve.offline.llm import LLM
from tests.support.families import quantised_models as tiny
from tests.support.families.parity import random_prompts, write_checkpoint
from tests.support.families.quantised_cases import CASES
from tests.support.families.quantised_folder import write_pair
from tests.support.kernels.kernel_sets import KERNEL_SETS

ReaderOf = Callable[..., WeightReader]
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ROWS, COLUMNS = 256, 128


class PackingKernels(TorchKernels):
    """A set that multiplies blocks of fp8 and no other format."""

    def __init__(self) -> None:
        super().__init__()
        self.has_packed_products = True

    def packed_layout(self, form: MatrixForm) -> PackedLayout | str:  # type: ignore[override]
        if form.values != "e4m3" or not form.group:
            return f"{form.name} are not for this set"
        return PackedLayout("blocks", 8.5)


def fp8_blocks(name: str, rows: int = ROWS, columns: int = COLUMNS) -> dict[str, Tensor]:
    blocks = (-(-rows // 128), -(-columns // 128))
    return {
        name: torch.ones(rows, columns).to(torch.float8_e4m3fn),
        name + "_scale_inv": torch.ones(blocks),
    }


def product(*names: str, half: int | None = None, is_transposed: bool = False) -> StoredProduct:
    tensors = [Stored(name, (ROWS, COLUMNS)) for name in names]
    return StoredProduct(tensors=tensors, half=half, is_transposed=is_transposed)


def packing_of(reader: WeightReader, mode: WeightsName = "auto") -> ExpertPacking:
    return ExpertPacking(reader, PackingKernels(), mode, torch.bfloat16)


def test_all_alike_stay_packed(reader_of: ReaderOf) -> None:
    reader = reader_of(fp8_blocks("a.weight") | fp8_blocks("b.weight"), FP8_BLOCKS)
    packing = packing_of(reader)
    forms = packing.forms(product("a.weight", "b.weight"), product("b.weight"))
    form = MatrixForm(values="e4m3", scales="float32", group=128, block_rows=128)
    assert forms == BankForms(form, form), forms
    said = "experts blocks packed, 8.50 bits"
    assert packing.description == said, packing.description


def test_one_in_floats_keeps_none_packed(
    reader_of: ReaderOf, caplog: pytest.LogCaptureFixture
) -> None:
    """The down projections are judged apart. The bits are the mean over all weights, two to one."""
    tensors = fp8_blocks("a.weight") | {"b.weight": torch.ones(ROWS, COLUMNS)}
    packing = packing_of(reader_of(tensors, FP8_BLOCKS))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # said once
            forms = packing.forms(product("a.weight", "b.weight"), product("a.weight"))
    assert forms.gate_up is None and forms.down is not None, forms
    said = "experts blocks packed (some bfloat16), 13.50 bits"
    assert packing.description == said, packing.description
    assert [record.getMessage() for record in caplog.records] == [
        "experts are dequantised while loading: the experts of a layer are stored in different "
        "ways (a.weight, ...)"
    ]


def test_floats_are_no_reason(reader_of: ReaderOf, caplog: pytest.LogCaptureFixture) -> None:
    packing = packing_of(reader_of({"a.weight": torch.ones(ROWS, COLUMNS)}))
    assert packing.forms(product("a.weight"), product("a.weight")) == BankForms()
    assert not packing.description and not caplog.records


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (product("a.weight", half=128), None),
        (product("a.weight", half=96), "blocks that gate and up share"),
        (product("a.weight", is_transposed=True), None),
    ],
)
def test_gate_and_up_in_one_tensor(
    reader_of: ReaderOf, wanted: StoredProduct, reason: str | None
) -> None:
    """Each half must begin with a block; blocks are transposed with their tensor."""
    packing = packing_of(reader_of(fp8_blocks("a.weight"), FP8_BLOCKS), "packed")
    if reason is None:
        form = packing.forms(wanted, product("a.weight")).gate_up
        assert form is not None and form.is_transposed == wanted.is_transposed, form
        return
    with pytest.raises(ConfigError, match=reason):
        packing.forms(wanted, product("a.weight"))


def test_what_the_set_refuses(reader_of: ReaderOf) -> None:
    """A shared expert may be dequantised all the same."""
    tensors = {
        "a.weight": torch.ones(ROWS, COLUMNS).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.ones(ROWS, 1),
    }
    packing = packing_of(reader_of(tensors, {"quant_method": "fp8"}), "packed")
    wanted = product("a.weight")
    assert packing.forms(wanted, wanted, is_routed=False) == BankForms()
    with pytest.raises(ConfigError, match="a.weight cannot stay packed: e4m3 rows are not for"):
        packing.forms(wanted, wanted)


def test_a_checkpoint_in_floats_cannot_be_packed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny.mixtral())
    with pytest.raises(ConfigError, match="cannot stay packed: it is stored in floats; use 'auto'"):
        ModelLoader(folder, kernels="torch", expert_weights="packed")


@pytest.mark.parametrize("kernels", KERNEL_SETS[1:])
def test_what_the_native_set_holds(tmp_path: Path, kernels: str) -> None:
    stored, _ = write_pair(tmp_path, CASES["Mixtral-8x7B-Instruct-v0.1-AWQ"])
    said = ModelLoader(stored, kernels="native", dtype=torch.float32).expert_weights
    assert said.startswith("experts int4 groups of 128 with zeros packed, 4.19 bits; "), said


def test_the_engine_says_what_it_holds(tmp_path: Path) -> None:
    """The layout names the formats, and the tokens are the same."""
    stored, _ = write_pair(tmp_path, CASES["Kimi-K2-Thinking"])
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    tokens = []
    for expert_weights, said in (
        ("packed", "experts int4 groups of 32 packed, 4.50 bits; the rest dequantised to float32"),
        ("auto", "dequantised to float32"),
    ):
        with LLM(str(stored), kernels="torch", expert_weights=expert_weights) as llm:  # type: ignore[arg-type]
            assert llm.layout.expert_weights == f"{said} while loading", llm.layout
            (output,) = llm.generate(random_prompts((5,)), params, use_progress_bar=False)
            tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1], tokens
