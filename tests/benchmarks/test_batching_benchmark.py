"""`benchmarks/run.py batching` counts what it says it counts, and the predictor benchmark and its
picture run. No timing is asserted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batching import batching, cost, layered_prefill, queue, request_prediction
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from pictures import predictor_figure

PREDICTOR = str(demo_model_folder() / "predictor")
TEXTS = {
    "law": "The bill was read twice and sent to the committee on the rules of the house. " * 60,
    "code": "static int next(struct list *l) { return l->head + l->size; }\n" * 60,
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for domain, text in TEXTS.items():
        (tmp_path / domain).mkdir()
        (tmp_path / domain / "valid.txt").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.timeout(300)
def test_splits_and_queue(
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(queue, "_WARM_UP", 4)
    monkeypatch.setattr(queue, "_STEPS", 8)
    path, plot = tmp_path / "batching.json", tmp_path / "batching.png"
    few = ["--sizes", "8", "--pools", "2", "--draws", "2", "--runs", "2", "--max-tokens", "3000"]
    where = ["--texts", str(texts), "--predictor", PREDICTOR]
    written = ["--json", str(path), "--plot", str(plot)]
    assert batching.main([*where, *few, *written, "--parts", "splits", "queue"]) == 0
    report = json.loads(path.read_text("utf-8"))
    assert report["num_pieces"].keys() == TEXTS.keys() and plot.stat().st_size > 1000
    activated = {each["policy"]: each["activated"] for each in report["splits"]}
    assert activated["fifo"] <= 2 * 6 * 32, "more than there are"
    for policy in ("history", "predictor", "predictor and history", "oracle"):  # two kinds of text
        assert 0 < activated[policy] < activated["fifo"], activated
    assert report["bursts"] and report["queues"] and "below fifo" in capsys.readouterr().out


def test_what_the_policy_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost, "_STEPS", 3)
    monkeypatch.setattr(cost, "_JOINS", 1)
    monkeypatch.setattr(cost, "_SHAPES", ((8, 2, 8), (8, 2, 8)))
    path = tmp_path / "batching.json"
    assert batching.main(["--parts", "cost", "--json", str(path)]) == 0
    report = json.loads(path.read_text("utf-8"))
    assert len(report["costs"]) == 2
    assert [each["num_free"] for each in report["joins"]] == [1, 4, 16, 64]
    assert all(each["num_waiting"] == 8 for each in report["joins"])
    assert "who joins" in capsys.readouterr().out


def test_texts_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        batching.main(["--parts", "splits"])
    assert "give --texts" in capsys.readouterr().err


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


def test_reads_of_layered_prefill_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chunk of 64 rows of random tokens activates most experts of a layer, so a prompt of three
    chunks reads them three times, and once in groups of layers."""
    path = tmp_path / "layered.json"
    few = ["--decoding", "1", "--prompts", "190", "--chunk", "64", "--rounds", "1"]
    assert layered_prefill.main([str(demo_model_folder()), *few, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    assert row["num_steps"]["off"] == 3
    most = 6 * 32 / 190
    assert 2 * most < row["reads"]["off"] <= 3 * most
    assert most / 2 < row["reads"]["on"] < 0.75 * row["reads"]["off"]
    assert row["ttft_ratio"]["off"] == [1.0, 1.0, 1.0]
    assert "demo_model   1   190" in capsys.readouterr().out
