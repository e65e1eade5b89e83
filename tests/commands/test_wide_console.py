"""Tables on a narrow terminal: no figure is cut, and words are folded."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.table import Table

from moe_serve.cli.console import wide_console
from moe_serve.cli.main import main

Capture = pytest.CaptureFixture[str]
TRACE = Path(__file__).resolve().parents[2] / "configs" / "placement" / "demo-model.safetensors"


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("NO_COLOR", "1"), ("COLUMNS", "40")):
        monkeypatch.setenv(name, value)


def test_a_table_of_figures_is_not_cut(capsys: Capture) -> None:
    table = Table("name", "seconds", "what it says")
    table.add_column("count", justify="right", no_wrap=True)
    table.add_row("a name of many letters", "123456.789", "three words here", "98,765,432")
    wide_console().print(table)
    printed = capsys.readouterr().out
    for cell in ("a name of many letters", "123456.789", "three words here", "98,765,432"):
        assert cell in printed, printed


def test_a_grid_of_words_is_folded(capsys: Capture) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("proof", "many words " * 10)
    wide_console().print(grid)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


def test_a_trace_is_shown_whole(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["trace", "show", str(TRACE), "--windows", "2"])
    printed = capsys.readouterr().out
    assert not exit_info.value.code and "\u2026" not in printed and "balancedness" in printed


def test_control_characters_of_a_file_are_shown_as_escapes(capsys: Capture) -> None:
    table = Table("name", "count")
    table.add_row("evil\x1b]0;title\x07", "1")
    wide_console().print(table)
    wide_console().print("again\x9b31m")
    printed = capsys.readouterr().out
    assert "\x1b]0" not in printed and "\x07" not in printed and "\x9b" not in printed
    assert "evil\\x1b]0;title" in printed and "again\\x9b31m" in printed
