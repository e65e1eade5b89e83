"""docs/internals/tree.md lists every folder of the product, and every folder says what it holds."""

from __future__ import annotations

import re

from tables import tree_table


def test_the_page_lists_every_folder() -> None:
    listed = re.findall(r"^\| `([\w/]+)/`", tree_table.BLOCK.text(), re.MULTILINE)
    assert listed == [path.as_posix() for path in tree_table.folders()], (
        "run: PYTHONPATH=scripts python -m tables.tree_table --write"
    )


def test_every_folder_has_a_purpose() -> None:
    root = tree_table.ROOT
    silent = [path for path in tree_table.folders() if not tree_table.purpose(root / path)]
    assert silent == []


def test_folders_to_add_things_to_exist() -> None:
    page = tree_table.BLOCK.page.read_text("utf-8")
    section = page.partition("## Where to add things")[2].partition("## Every room")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("|")]
    named = re.findall(r"`([\w/]+/[\w/]*)`", "".join(rows))
    assert len(named) > 10
    root = tree_table.ROOT
    assert [name for name in named if not (root / name).is_dir()] == []
