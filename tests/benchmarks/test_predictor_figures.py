"""The figure and the benchmark of predictors, on small things."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batching import request_prediction
from pictures import predictor_figure


def test_figure(tmp_path: Path) -> None:
    layers = {str(layer): [0.5, 0.4, 0.6] for layer in range(3)}
    calibration = {"error": 0.01, "predicted": [0.1, 0.6], "observed": [0.1, 0.5]}
    verdict = {"overlap": {"layers": layers}, "calibration": calibration}
    verdicts = {"request": {"request predictor": verdict, "marginal": verdict}}
    path, out = tmp_path / "evaluation.json", tmp_path / "figure.png"
    path.write_text(json.dumps({"verdicts": verdicts}))
    predictor_figure.main([str(path), "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")


def test_benchmark_prints_every_cell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_prediction, "BATCHES", (1, 2))
    monkeypatch.setattr(request_prediction, "LENGTHS", (4, 600))
    request_prediction.main([])
    _, header, first, second, _, *learning = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split() for line in learning] == [
        [str(layers), "layers", "x", str(experts), "experts"]
        for layers, experts, _ in request_prediction.SHAPES
    ]
    assert header.split() == ["requests", "4", "tokens", "600", "tokens"]
    for line, batch in ((first, "1"), (second, "2")):
        cells = line.split()
        assert cells[0] == batch and all(int(cell) > 0 for cell in cells[1:])
