"""The plan: the quantised modules, their schemes, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_serve.errors import ConfigError
from moe_serve.quantize.quantise_plan import (
    INT8_ROWS,
    QuantisePlan,
    QuantiseRules,
    is_read_by_transformers,
    storages,
)
from moe_serve.quantize.quantization_config import quantization_config
from moe_serve.quantize.quantize_job import CheckpointSource
from moe_serve.quantize.rounded_matrix import Storage

INT4 = Storage(4, 32)


def _plan(folder: Path, **rules: object) -> QuantisePlan:
    return CheckpointSource(folder).plan(QuantiseRules(**{"experts": INT4, **rules}))  # type: ignore[arg-type]


def test_the_default_quantises_experts_and_attention(tiny_model: Path) -> None:
    plan = _plan(tiny_model)
    assert storages(plan) == (INT8_ROWS, INT4)
    assert [len(layer.experts) for layer in plan.layers] == [8, 8]
    assert all(len(layer.attention) == 4 for layer in plan.layers)
    config = quantization_config(plan)
    assert config["ignore"] == ["lm_head", r"re:.*\.layers\.\d+\.mlp\.gate$"]
    experts = config["config_groups"]["group_1"]
    assert experts["targets"] == [r"re:.*\.layers\.\d+\.mlp\.experts\..*"]
    assert experts["weights"]["group_size"] == 32
    assert config["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    assert is_read_by_transformers(plan)


def test_layers_in_int8_are_named(tiny_model: Path) -> None:
    plan = _plan(tiny_model, int8_layers=frozenset({1}), attention=None)
    groups = quantization_config(plan)["config_groups"]
    assert groups["group_0"]["targets"] == [r"re:.*\.layers\.(0)\.mlp\.experts\..*"]
    assert groups["group_1"]["targets"] == [r"re:.*\.layers\.(1)\.mlp\.experts\..*"]
    assert not is_read_by_transformers(plan)


def test_kept_modules_are_ignored(tiny_model: Path) -> None:
    plan = _plan(tiny_model, keep=r"layers\.0\.mlp\.experts|k_proj")
    assert [len(layer.experts) for layer in plan.layers] == [0, 8]
    ignored = quantization_config(plan)["ignore"]
    assert r"re:.*\.layers\.(0)\.mlp\.experts\..*" in ignored
    assert r"re:.*\.layers\.\d+\.self_attn\.k_proj$" in ignored


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"experts": Storage(4, 128)}, "which does not divide the 64 inputs .* 32 or 64 would"),
        ({"keep": r"experts\.3\."}, "keeps some routed experts of layer 0 and not others"),
        ({"keep": "gate_proj"}, "keeps some routed experts of layer 0"),
        ({"keep": "("}, "which is not a pattern"),
        ({"keep": ".", "attention": None}, "nothing is left to quantise"),
    ],
)  # fmt: skip
def test_refusals(tiny_model: Path, rules: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _plan(tiny_model, **rules)
