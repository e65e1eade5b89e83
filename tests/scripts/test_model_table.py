"""docs/guide/models.md agrees with the families, and they give published models their sizes."""

from __future__ import annotations

import pytest

from moe_serve.model.families import FAMILIES
from tables import model_table

# In billions, as their makers state them: parameters, and those that a token passes.
STATED = {
    "openai/gpt-oss-120b": (116.83, 5.13),
    "openai/gpt-oss-20b": (20.91, 3.61),
    "deepseek-ai/DeepSeek-V3": (671, 37),
    "deepseek-ai/DeepSeek-V2-Chat": (236, 21),
    "deepseek-ai/DeepSeek-V2-Lite": (15.7, 2.4),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (46.7, 12.9),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": (141, 39),
    "Qwen/Qwen3-235B-A22B": (235, 22),
    "MiniMaxAI/MiniMax-M2": (230, 10),
    "rednote-hilab/dots.llm1.inst": (142, 14),
    "baidu/ERNIE-4.5-300B-A47B-PT": (300, 47),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": (400, 17),  # both with the vision tower
}


def test_the_page_holds_the_generated_tables() -> None:
    assert model_table.BLOCK.text() == model_table.render(), "run tables.model_table --write"


def test_every_family_says_what_is_particular() -> None:
    silent = [family.name for family in FAMILIES if not model_table.particulars(family)]
    assert not silent, (
        f"{silent}: the first line of its file or reader must read 'Name: particulars.'"
    )


def test_every_family_has_a_case() -> None:
    cases = model_table.case_names()
    names = [family.name for family in FAMILIES]
    assert [n for n in names if not any(c == n or c.startswith(n + "-") for c in cases)] == []


@pytest.mark.parametrize("repository", STATED)
def test_sizes_are_those_that_were_published(repository: str) -> None:
    family, spec = model_table.read(model_table.published()[repository])
    for found, stated in zip(
        model_table.num_parameters(family, spec), STATED[repository], strict=True
    ):
        assert found / 1e9 == pytest.approx(stated, rel=0.05), f"{repository}: {found / 1e9:.2f} B"
