"""Whole runs: a written model loads again, with the chosen weights."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig

from moe_serve.errors import ConfigError
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.load.weight_reader import open_checkpoint
from moe_serve.quantize.quantise_plan import QuantiseRules
from moe_serve.quantize.quantise_report import model_card, record, report_files, summary
from moe_serve.quantize.quantise_texts import read_texts
from moe_serve.quantize.quantize_job import (
    CheckpointSource,
    QuantiseJob,
    QuantiseOutcome,
    quantise,
)
from moe_serve.quantize.rounded_matrix import MXFP4, Storage
from moe_serve.quantize.rtn import rounded
from moe_serve.text.tokenizer import Tokenizer
from tests.support.families.all_cases import CASES
from tests.support.families.case import Case
from tests.support.families.cases.gpt_oss import COMMON
from tests.support.families.parity import model_logits, random_prompts, write_checkpoint

INT4, INT8 = Storage(4, 32), Storage(8, 32)
# One case of each family; GPT-OSS is tested by itself.
_FAMILIES = {name.partition("-")[0]: name for name in reversed(CASES)}
_FAMILIES.pop("gpt_oss")


def _run(folder: Path, out: Path, rules: QuantiseRules, **more: object) -> QuantiseOutcome:
    job = QuantiseJob(folder=folder, out=out, rules=rules, is_gptq=False, **more)  # type: ignore[arg-type]
    if more.get("num_tokens"):
        job = QuantiseJob(folder=folder, out=out, rules=rules, is_gptq=True, **more)  # type: ignore[arg-type]
    return quantise(job, lambda what, share: None, report_files)


@pytest.mark.parametrize("family", sorted(_FAMILIES))
def test_every_family_is_read_back(family: str, tmp_path: Path) -> None:
    """In int8, most logits are near the original's (a router may choose other experts for a token).
    The groups are as small as the models."""
    case: Case = CASES[_FAMILIES[family]]
    folder = write_checkpoint(tmp_path / "plain", case)
    _run(folder, tmp_path / "out", QuantiseRules(experts=Storage(8, 4)))
    (prompt,) = random_prompts((12,))
    before, after = (model_logits(each, "torch", prompt, 12) for each in (folder, tmp_path / "out"))
    error = (before - after).abs().median() / before.abs().median()
    assert 0 < error < 0.1, f"{error=:.4f}"


def test_the_stored_weights_are_the_rounded_ones(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _run(tiny_model, out, QuantiseRules(experts=INT4, head=Storage(8, 0)))
    assert ModelLoader(out).weight_format == "compressed-tensors int8 rows and int4 groups of 32"
    plan = CheckpointSource(tiny_model).plan(QuantiseRules(experts=INT4, head=Storage(8, 0)))
    before, after = (open_checkpoint(f, HFConfig.read(f)) for f in (tiny_model, out))
    for matrix in plan.matrices:
        if ".experts." in matrix.name:  # fused in the original
            continue
        weight = before.read(matrix.name, matrix.shape, torch.float32)
        expected = rounded(weight, matrix.storage, torch.float32).floats(torch.float32)
        assert torch.equal(after.read(matrix.name, matrix.shape, torch.float32), expected)
    loaders = ModelLoader(tiny_model), ModelLoader(out, expert_weights="dequantised")
    original, found = (loader.live_experts().read(1, 5) for loader in loaders)
    assert isinstance(original.down, torch.Tensor) and isinstance(found.down, torch.Tensor)
    expected = rounded(original.down, INT4, torch.float32).floats(torch.float32)
    assert torch.equal(found.down, expected)
    for name in ("tokenizer.json", "README.md", "quantization_report.json"):
        assert (out / name).is_file()


@pytest.fixture(scope="module")
def gptq(
    tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, QuantiseOutcome]:
    out = tmp_path_factory.mktemp("gptq") / "out"
    rules = QuantiseRules(experts=INT4)
    more = {"texts": (texts,), "num_tokens": 6000, "num_held_out": 1000}
    return out, _run(tiny_model, out, rules, **more)


def test_gptq_measures_and_reports(gptq: tuple[Path, QuantiseOutcome]) -> None:
    out, outcome = gptq
    assert [figures.domain for figures in outcome.domains] == ["first", "second"]
    assert all(0.5 < figures.ratio < 2 and figures.kl > 0 for figures in outcome.domains)
    assert [len(layer) for layer in outcome.experts] == [8, 8]
    tokens = sum(outcome.num_calibration_tokens.values())
    for layer in outcome.experts:
        assert sum(each.num_rows for each in layer) == 2 * tokens, "two experts for each token"
    written = json.loads((out / "quantization_report.json").read_text())
    assert written == json.loads(json.dumps(record(outcome)))
    assert "| first |" in model_card(outcome) and "mean" in "\n".join(summary(outcome))


def test_the_measured_perplexity_is_that_of_the_written_model(
    gptq: tuple[Path, QuantiseOutcome], tiny_model: Path, texts: Path
) -> None:
    """The layer-by-layer run of the rounded model has the logits of the model that was written."""
    out, outcome = gptq
    pieces = read_texts(
        [texts],
        Tokenizer.load(tiny_model),
        num_tokens=0,
        num_held_out=1000,
        max_piece=512,
        seed=0,
    ).held_out
    nats, count = 0.0, 0
    for piece in pieces:
        if piece.label == "first":
            tokens = piece.tokens.tolist()
            found = model_logits(out, "torch", tokens, len(tokens)).log_softmax(-1)
            nats -= float(found[torch.arange(len(tokens) - 1), tokens[1:]].double().sum())
            count += len(tokens) - 1
    figures = outcome.domains[0]
    assert count == figures.num_tokens
    assert math.exp(nats / count) == pytest.approx(figures.perplexity_after, rel=1e-5)
    assert outcome.bytes_after == sum(
        path.stat().st_size - _header_bytes(path) for path in out.glob("*.safetensors")
    )


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_held_out_texts_of_their_own(tiny_model: Path, texts: Path) -> None:
    arguments: dict[str, Any] = {"num_held_out": 5000, "max_piece": 512, "seed": 0}
    tokenizer = Tokenizer.load(tiny_model)
    first, second = texts / "first.txt", texts / "second.txt"
    split = read_texts([texts], tokenizer, num_tokens=9000, **arguments)
    assert not {p.request_id for p in split.calibration} & {p.request_id for p in split.held_out}
    apart = read_texts([texts], tokenizer, held_out_paths=[first], num_tokens=9000, **arguments)
    assert {piece.label for piece in apart.calibration} == {"second"}
    assert {piece.label for piece in apart.held_out} == {"first"}
    with pytest.raises(ConfigError, match="no document"):
        read_texts([second], tokenizer, held_out_paths=[second], num_tokens=9000, **arguments)


def test_sensitive_layers_are_in_int8(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    more = {"texts": (texts,), "num_held_out": 500}
    rules = QuantiseRules(experts=INT4)
    outcome = _run(tiny_model, tmp_path / "out", rules, int8_budget=0.0, **more)
    assert outcome.int8_layers == {0, 1} and len(outcome.divergences) == 2
    assert all(value > 0 for value in outcome.divergences)
    loader = ModelLoader(tmp_path / "out")
    assert loader.weight_format == "compressed-tensors int8 rows and int8 groups of 32"
    between = max(outcome.divergences) * 0.999
    one = _run(tiny_model, tmp_path / "one", rules, int8_budget=between, **more)
    assert len(one.int8_layers) == 1


def test_refusals(
    tiny_model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, out = QuantiseRules(experts=INT4), tmp_path / "out"
    short = tmp_path / "short.txt"
    short.write_text("a few words that are not enough to calibrate on, whatever they say " * 5)
    with pytest.raises(ConfigError, match="at least 1024 are needed"):
        _run(tiny_model, out, rules, texts=(short,), num_tokens=5000)
    with pytest.raises(ConfigError, match="does not exist"):
        _run(tiny_model, out, rules, texts=(tmp_path / "no.txt",))
    _run(tiny_model, out, rules)
    with pytest.raises(ConfigError, match="out exists"):
        _run(tiny_model, out, rules)
    with pytest.raises(ConfigError, match="quantised already .'compressed-tensors'.: give"):
        _run(out, tmp_path / "again", rules)
    monkeypatch.setattr("moe_serve.quantize.quantize_job.free_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match="0.0 GB of memory are free: lower --tokens"):
        _run(tiny_model, tmp_path / "again", rules)
    assert {p.name for p in tmp_path.iterdir()} == {"out", "short.txt"}


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    folder = write_checkpoint(tmp_path / "plain", Case(GptOssConfig(**COMMON | sizes)))
    with pytest.raises(ConfigError, match=re.escape("gpt_oss are stored in one tensor")):
        _run(folder, tmp_path / "no", QuantiseRules(experts=INT8))
    out = tmp_path / "out"
    _run(folder, out, QuantiseRules(experts=MXFP4, attention=None))
    assert ModelLoader(out).weight_format == "mxfp4"
    loaders = ModelLoader(folder), ModelLoader(out, expert_weights="dequantised")
    original, found = (loader.live_experts().read(2, 3) for loader in loaders)
    for part in ("gate", "up", "down"):
        weight = getattr(original, part)
        expected = rounded(weight, MXFP4, torch.float32).floats(torch.float32)
        assert torch.equal(getattr(found, part), expected), part
        assert (expected - weight).abs().max() <= weight.abs().max() / 6
    for bias in ("gate_bias", "up_bias", "down_bias"):
        assert torch.equal(getattr(found, bias), getattr(original, bias)), bias
    (prompt,) = random_prompts((12,))
    assert model_logits(out, "torch", prompt, 12).isfinite().all()


def test_mxfp4_is_for_gpt_oss_alone(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="those of qwen3_moe are stored in another way"):
        _run(tiny_model, tmp_path / "out", QuantiseRules(experts=MXFP4, attention=None))
