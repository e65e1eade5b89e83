"""`moe-serve timeline`: the table, the picture, and one sentence for each mistake."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_serve.cli.main import main
from moe_serve.pipeline.timeline.timeline_file import TimelineWriter
from moe_serve.pipeline.timeline.timeline_recorder import Role, Track
from pictures.timeline_figure import SimulatedPipeline

Capture = pytest.CaptureFixture[str]


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in ("timeline", *arguments)])
    return int(exit_info.value.code or 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Steps 10 to 14 of 2 attention and 3 expert ranks, 4 layers; step 14 has 3 micro-batches."""
    pipeline, path = SimulatedPipeline(2, 3, num_layers=4), tmp_path / "run.json"
    for step in range(10, 15):
        pipeline.run_step(step, 3 if step == 14 else 2)
    writer = TimelineWriter(path)
    for track, records in pipeline.tracks().items():
        writer.write(track, records, offset_ns=writer.zero_ns)
    writer.close()
    return path


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_table_and_the_middle_step(file: Path, capsys: Capture) -> None:
    assert run(file) == 0
    text = capsys.readouterr().out
    for words in ("4 with 2, 1 with 3", "5, ", "the longest is", "expert 2", "wait_combine"):
        assert words in text, f"{words!r} is not in:\n{text}"
    assert "Step 12, 2 micro-batches, 2 attention and 3 expert ranks" in text
    assert is_png(file.with_suffix(".png"))


def test_steps_layers_and_the_name_of_the_picture(file: Path, capsys: Capture) -> None:
    out = file.parent / "picture.png"
    assert run(file, "--out", out, "--step", 14, "--layers", "1:2") == 0
    text = capsys.readouterr().out
    assert "1 with 3" in text and "Step 14, layers 1 to 2, 3 micro-batches" in text
    assert is_png(out)
    assert run(file, "--out", out, "--steps", "13:99") == 0
    assert "Steps 13 to 99, 2 or 3 micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", 9), "holds steps 10 to 14, not step 9"),
        (("--steps", "20:30"), "holds steps 10 to 14, not step 20 to 30"),
        (("--steps", "12:11"), "11 comes before 12"),
        (("--steps", "a:b"), "--steps cannot be 'a:b'"),
        (("--steps", "1:"), "--steps cannot be '1:'"),
        (("--step", 10, "--steps", "10:11"), "cannot be combined"),
        (("--step", 10, "--layers", "9:10"), "no layer from 9 to 10 is recorded"),
        (
            ("--step", 10, "--out", "/proc/none/x.png"),
            "/proc/none/x.png cannot be written: /proc/none is not a folder",
        ),
        (("--step", 10, "--out", "/proc"), "/proc cannot be written: it is a folder"),
        (("--step", 10, "--out", "picture"), "call it picture.png, or .svg"),
        (("--step", 10, "--out", "x.words"), "cannot draw into x.words"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    file: Path, capsys: Capture, arguments: tuple[object, ...], message: str
) -> None:
    assert run(file, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error


def test_a_file_that_is_none(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "x.json").write_text("[]", "utf-8")
    assert run(tmp_path / "x.json") == 2
    assert "is not a timeline" in capsys.readouterr().err
    assert run(tmp_path / "none.json") == 2
    assert "cannot read the timeline" in capsys.readouterr().err


def test_without_matplotlib_the_table_still_comes(
    file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **names: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **names)

    monkeypatch.setattr(builtins, "__import__", without)
    assert run(file) == 2
    captured = capsys.readouterr()
    assert "wait_combine" in captured.out
    assert "needs matplotlib: pip install 'moe-serve[plot]'" in captured.err


def test_too_many_stages_for_one_picture(
    file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_serve.pipeline.timeline.timeline_plot.MAX_BARS", 10)
    assert run(file) == 2
    assert "choose fewer with --step or --layers" in capsys.readouterr().err


def test_a_cut_file_and_lost_records_are_said(tmp_path: Path, capsys: Capture) -> None:
    pipeline = SimulatedPipeline(1, 1, num_layers=2)
    pipeline.run_step(0, 1)
    tracks: Mapping[Track, Any] = pipeline.tracks()
    writer = TimelineWriter(tmp_path / "t.json")
    for track, records in tracks.items():
        num_lost = 3 if track == Track(Role.EXPERT, 0) else 0
        writer.write(track, records, offset_ns=writer.zero_ns, num_lost=num_lost)
    writer.close()
    text = (tmp_path / "t.json").read_text("utf-8")
    (tmp_path / "t.json").write_text(text.removesuffix("]\n"), "utf-8")
    assert run(tmp_path / "t.json") == 0
    out = capsys.readouterr().out
    assert "records lost" in out and "is missing: the server was killed" in out
