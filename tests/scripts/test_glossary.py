"""Each class that docs/guide/glossary.md names exists in the folder that the page gives."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guide" / "glossary.md").read_text("utf-8")
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| (?!word|-)", line)]
NAMED = re.findall(r"`(\w+)` in `([\w/]+)/`", PAGE)


@pytest.mark.parametrize(("name", "folder"), NAMED)
def test_the_class_exists(name: str, folder: str) -> None:
    assert (ROOT / folder).is_dir(), folder
    assert any(name in classes(path) for path in (ROOT / folder).rglob("*.py"))


def test_every_word_has_a_meaning_and_a_class_or_a_dash() -> None:
    assert len(ROWS) > 40
    for row in ROWS:
        word, meaning, place = (cell.strip() for cell in row.strip("|").split("|"))
        assert word and len(meaning) > 20, row
        assert place == "-" or re.fullmatch(r"`\w+` in `[\w/]+/`", place), row


def test_no_word_is_explained_twice() -> None:
    words = [row.split("|")[1].strip() for row in ROWS]
    assert sorted(words) == sorted(set(words))


def classes(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
