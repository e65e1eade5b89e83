"""Calibrations on disk: the round trip and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_serve.errors import ConfigError
from moe_serve.planning.calibration_file import read_calibration, write_calibration
from tests.support.cluster.calibrations import HTTP, cpu_calibration


def test_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    for calibration in (cpu_calibration(), replace(cpu_calibration(), http=HTTP)):
        write_calibration(calibration, path)
        assert read_calibration(path) == calibration


def _set(*path: str | int, value: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _set("schema", value=2),
            "has calibration schema 2, but this version reads 3: run moe-serve calibrate again",
        ),
        (_set("schema", value=None), "has calibration schema None"),
        (_set("costs", "link", "transfer", "alpha_s", value="fast"), r"Expected `float`.*alpha_s"),
        (_set("costs", "link", "transfer", "alpha_s", value=-1.0), "negative times"),
        (_set("http", "begin_s", value=-1.0), "negative times"),
        (_set("http", "step", "beta_s", value=-1.0), "negative times"),
        (_set("http", value={}), "missing required field `request`"),
        (_set("costs", "experts", "num_effective", value=500.0), "contradict each other"),
        (_set("model", "num_layers", value=5), "contradict each other"),
        (_set("costs", "layers", value=[]), "contradict each other"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(replace(cpu_calibration(), http=HTTP), path)
    document = json.loads(path.read_text("utf-8"))
    change(document)
    path.write_text(json.dumps(document), "utf-8")
    with pytest.raises(ConfigError, match=message):
        read_calibration(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "{}", "[" * 10_000])
def test_other_files_are_no_calibrations(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="calibration.json is not a calibration: "):
        read_calibration(path)


def test_missing_and_unwritable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the calibration .*: No such file"):
        read_calibration(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="cannot write the calibration"):
        write_calibration(cpu_calibration(), tmp_path / "no" / "folder.json")
