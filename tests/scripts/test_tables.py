"""The generated tables of the docs equal those of the code."""

from __future__ import annotations

import re

import yaml

from moe_serve.config.keys import config_keys
from tables import config_table, tree_table


def test_the_page_holds_the_generated_tables() -> None:
    shown = config_table.BLOCK.text()
    assert shown == config_table.render(), "run tables.config_table --write"


def test_every_key_has_a_meaning() -> None:
    meanings = config_table.comments(config_table.EXAMPLE.read_text("utf-8"))
    assert [key.path for key in config_keys() if not meanings.get(key.path)] == []


def test_every_flag_stands_in_the_tables() -> None:
    parameters = config_table.serve_parameters()
    shown = {config_table.flag_of(key, parameters) for key in config_keys()} - {""}
    assert shown == {flag if flag.startswith("-") else flag.upper() for flag in parameters.values()}


def test_comments_of_both_levels() -> None:
    text = "# top\na:  # first\n  b: 1  # second\n  c: null\nd:\n  b: [x]   # third\n"
    assert config_table.comments(text) == {
        "a": "first", "a.b": "second", "a.c": "", "d": "", "d.b": "third"
    }  # fmt: skip
    assert yaml.safe_load(text) == {"a": {"b": 1, "c": None}, "d": {"b": ["x"]}}


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
