"""Renders the tables of docs/guide/models.md from the families.

    PYTHONPATH=scripts python -m tables.model_table            print them
    PYTHONPATH=scripts python -m tables.model_table --write    put them into docs/guide/models.md
    PYTHONPATH=scripts python -m tables.model_table --check    fail if the page differs

Names and architectures come from the registry, descriptions from the first line of each family's
file, models from the published configs in configs/models/, cases from tests/families/ and
tests/engine/.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from moe_serve.model.checkpoint.hf_config import HFConfig, check_spec
from moe_serve.model.checkpoint.manifest import (
    Table,
    attention_table,
    expert_table,
    feed_forward_table,
    model_table,
)
from moe_serve.model.families import FAMILIES, Family, family_of
from moe_serve.model.formats import FORMATS
from moe_serve.model.rope import LinearScaling, Llama3Scaling, YarnScaling
from moe_serve.model.spec import ModelSpec
from tables.page_block import PageBlock

_BF16 = 2  # bytes


def num_parameters(family: Family, spec: ModelSpec) -> tuple[int, int]:
    """Returns the number of all parameters, and of those that one token uses.

    A token uses every matrix except the embedding (unless it is also the head) and the experts that
    it did not choose.
    """
    names, experts = family.names, family.names.experts[0]
    tables = [model_table(names, spec)]
    for layer in range(spec.num_layers):
        tables += [attention_table(names, spec, layer), feed_forward_table(names, spec, layer)]
    num_layers = sum(layer.is_sparse for layer in spec.layers)
    num_tables = num_layers * (spec.router.num_experts if experts.gate else 1)
    routed = num_tables * _num_values(expert_table(experts, spec, 0, 0))  # all are alike
    total = sum(map(_num_values, tables)) + routed
    chosen = routed * spec.router.top_k // spec.router.num_experts
    embedding = 0 if spec.is_head_tied else spec.vocab_size * spec.width
    return total, total - routed + chosen - embedding


def _num_values(table: Table) -> int:
    return sum(math.prod(stored.shape) for stored in table.values())


def in_billions(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e10 else f"{count / 1e9:.2f} B"


def layers(spec: ModelSpec) -> str:
    num_dense = sum(not layer.is_sparse for layer in spec.layers)
    return f"{spec.num_layers}, {num_dense} dense" if num_dense else f"{spec.num_layers}"


def experts(spec: ModelSpec) -> str:
    words = f"{spec.router.top_k} of {spec.router.num_experts}, width {spec.expert_width}"
    if spec.shared is not None:
        gated = "gated " if spec.shared.has_gate else ""
        words += f"; {gated}shared, width {spec.shared.width}"
    return words


def router(spec: ModelSpec) -> str:
    shape = spec.router.shape
    parts: list[str] = [shape.scoring]
    if shape.num_groups > 1:
        parts.append(f"{shape.num_groups_kept} of {shape.num_groups} groups")
    if spec.router.has_bias:
        parts.append("bias")
    if spec.router.has_selection_bias:
        parts.append("selection bias")
    if shape.is_renormalised:
        parts.append("renormalised")
    if shape.scaling != 1.0:
        parts.append(f"times {shape.scaling:g}")
    if spec.router.is_weighing_inputs:
        parts.append("weighs inputs")
    return ", ".join(parts)


def attention(spec: ModelSpec) -> str:
    return "; ".join([_heads(spec), *_per_layer(spec), *_positions(spec), *_extras(spec)])


def cache_per_token(spec: ModelSpec) -> str:
    return f"{spec.kv_bytes_per_token(_BF16) / 1024:.1f} KiB"


def _heads(spec: ModelSpec) -> str:
    a = spec.attention
    if spec.latent is not None:
        return f"{a.num_heads} heads on a latent of {spec.latent.latent_dim} + {spec.rope.dim}"
    if a.num_heads == a.num_kv_heads:
        return f"{a.num_heads} heads of {a.head_dim}"
    return f"{a.num_heads} heads of {a.head_dim} on {a.num_kv_heads}"


def _per_layer(spec: ModelSpec) -> list[str]:
    """Describes windows, chunks and layers without rotation, with the number of layers."""
    kinds: Counter[str] = Counter()
    for layer in spec.layers:
        if layer.attention.sliding_window is not None:
            kinds[f"window {layer.attention.sliding_window}"] += 1
        if layer.attention.chunk is not None:
            kinds[f"chunks of {layer.attention.chunk}"] += 1
        if not layer.has_rotation:
            kinds["no rotation"] += 1
    return [
        kind if count == spec.num_layers else f"{kind} in {count} layers"
        for kind, count in kinds.items()
    ]


def _positions(spec: ModelSpec) -> list[str]:
    parts = []
    if spec.latent is None and spec.rope.dim != spec.attention.head_dim:
        parts.append(f"{spec.rope.dim} values rotated")
    match spec.rope.scaling:
        case YarnScaling(factor=factor):
            parts.append(f"YaRN {factor:g}")
        case Llama3Scaling(factor=factor):
            parts.append(f"Llama 3 scaling {factor:g}")
        case LinearScaling(factor=factor):
            parts.append(f"linear scaling {factor:g}")
        case None:
            pass
    if spec.query_temperature is not None:
        parts.append("temperature")
    return parts


def _extras(spec: ModelSpec) -> list[str]:
    a = spec.attention
    return [
        words
        for words, is_there in (
            ("sinks", a.has_sinks),
            (f"q/k norm per {a.qk_norm}", a.qk_norm != "none"),
            ("biases", spec.has_attention_bias),
        )
        if is_there
    ]


ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "models"
BLOCK = PageBlock(
    page=ROOT / "docs" / "guide" / "models.md",
    start="<!-- model-table: start -->",
    end="<!-- model-table: end -->",
)
_HUB = "https://huggingface.co/"


def published() -> dict[str, dict[str, Any]]:
    """Returns the numbers of each published config.json by repository, sorted by architecture and
    name."""
    values = [json.loads(path.read_text("utf-8")) for path in sorted(CONFIGS.glob("*.json"))]
    return {value["_name_or_path"]: value for value in values}


def read(values: dict[str, Any]) -> tuple[Family, ModelSpec]:
    """Reads a config as the loader does."""
    config = HFConfig(values, str(values["_name_or_path"]))
    family = family_of(config)
    spec = family.read_spec(config.text())
    check_spec(spec, config)
    return family, spec


def case_names() -> list[str]:
    """Counts the tiny models that are compared with transformers; a case is called
    `family-variant`."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    names = importlib.import_module("tests.support.families.all_cases").CASES
    return [*names, *importlib.import_module("tests.engine.test_parity").VARIANTS]


def render() -> str:
    models = {repository: read(values) for repository, values in published().items()}
    lines = ["| family | architectures | what is particular | MTP | cases |"]
    lines += ["|---|---|---|---|---|"]
    lines += [_family_row(family, case_names()) for family in FAMILIES]
    lines += ["", f"Weights: float32, float16, bfloat16, or stored as {', '.join(FORMATS)}.", ""]
    lines += [
        "| model | parameters, active | layers | experts | router | attention | cache, a token |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        _model_row(repository, *model)
        for family in FAMILIES
        for repository, model in models.items()
        if model[0] is family
    ]
    return "\n".join(lines) + "\n"


def _family_row(family: Family, cases: list[str]) -> str:
    mine = [name for name in cases if name == family.name or name.startswith(family.name + "-")]
    names = "<br>".join(f"`{name}`" for name in family.architectures)
    mtp = "" if family.read_mtp is None else "drafts"
    return f"| `{family.name}` | {names} | {particulars(family)} | {mtp} | {len(mine)} |"


def particulars(family: Family) -> str:
    """Returns the first line of the family's reader, or else of its file, after the name."""
    text = family.read_spec.__doc__ or sys.modules[family.read_spec.__module__].__doc__ or ""
    return text.split("\n")[0].partition(": ")[2].removesuffix(".")


def _model_row(repository: str, family: Family, spec: ModelSpec) -> str:
    total, active = num_parameters(family, spec)
    cells = (
        f"[{repository.partition('/')[2]}]({_HUB}{repository})",
        f"{in_billions(total)}, {in_billions(active)}",
        layers(spec),
        experts(spec),
        router(spec),
        attention(spec),
        cache_per_token(spec),
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="The tables of docs/guide/models.md.")
    parser.add_argument("--write", action="store_true", help="put them into the page")
    parser.add_argument("--check", action="store_true", help="fail if the page differs")
    arguments = parser.parse_args()
    if arguments.write:
        BLOCK.write(render())
    elif not arguments.check:
        print(render())
    elif BLOCK.text() != render():
        print("docs/guide/models.md is out of date: write it anew with --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
