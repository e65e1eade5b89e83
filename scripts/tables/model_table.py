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
import sys
from pathlib import Path
from typing import Any

from moe_serve.model.checkpoint.hf_config import HFConfig, check_spec
from moe_serve.model.families import FAMILIES, Family, family_of
from moe_serve.model.formats import FORMATS
from moe_serve.model.spec import ModelSpec
from tables import model_facts

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "models.md"
CONFIGS = ROOT / "configs" / "models"
START, END = "<!-- model-table: start -->", "<!-- model-table: end -->"
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
    lines = ["| family | architectures | what is particular | cases |", "|---|---|---|---|"]
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
    return f"| `{family.name}` | {names} | {particulars(family)} | {len(mine)} |"


def particulars(family: Family) -> str:
    """Returns the first line of the family's reader, or else of its file, after the name."""
    text = family.read_spec.__doc__ or sys.modules[family.read_spec.__module__].__doc__ or ""
    return text.split("\n")[0].partition(": ")[2].removesuffix(".")


def _model_row(repository: str, family: Family, spec: ModelSpec) -> str:
    total, active = model_facts.num_parameters(family, spec)
    cells = (
        f"[{repository.partition('/')[2]}]({_HUB}{repository})",
        f"{model_facts.in_billions(total)}, {model_facts.in_billions(active)}",
        model_facts.layers(spec),
        model_facts.experts(spec),
        model_facts.router(spec),
        model_facts.attention(spec),
        model_facts.cache_per_token(spec),
    )
    return f"| {' | '.join(cells)} |"


def block(page: str) -> tuple[str, str, str]:
    """Returns the page before, between and after the markers."""
    before, start, rest = page.partition(START)
    between, end, after = rest.partition(END)
    assert start and end, f"{PAGE.name} must hold the lines {START} and {END}"
    return before + start + "\n\n", between.strip("\n") + "\n", "\n" + end + after


def main() -> int:
    parser = argparse.ArgumentParser(description="The tables of docs/guide/models.md.")
    parser.add_argument("--write", action="store_true", help="put them into the page")
    parser.add_argument("--check", action="store_true", help="fail if the page differs")
    arguments = parser.parse_args()
    if not arguments.write and not arguments.check:
        print(render())
        return 0
    before, shown, after = block(PAGE.read_text("utf-8"))
    if arguments.write:
        PAGE.write_text(before + render() + after, "utf-8")
    elif shown != render():
        print("docs/guide/models.md is out of date: write it anew with --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
