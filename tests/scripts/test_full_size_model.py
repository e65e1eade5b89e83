"""The script that writes random checkpoints of published sizes: exact sizes, and cut ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

import moe_serve
from make_full_size_model import (
    Cuts,
    main,
    published_config,
    random_tensors,
    write_full_size_model,
)
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.model.load.loader import ModelLoader

_NUM_EXPERTS = {"gpt-oss-20b": 5, "Qwen3-30B-A3B": 8}  # a token has 4 and 8


def _num_bytes(model: str, group: int) -> int:
    tensors = random_tensors(published_config(model, group), model, group)
    return sum(tensor.planned.nbytes for tensor in tensors)


def test_sizes() -> None:
    """The sizes are `total_size` of the published index of gpt-oss-20b, and int4 computed by
    hand."""
    assert _num_bytes("gpt-oss-20b", 32) == 13_761_264_768
    embedding_and_head, norms = 2 * 151936 * 2048, 48 * (2 * 2048 + 2 * 128) + 2048
    router = 48 * 128 * 2048
    linears = 48 * (2048 * 128 * (2 * 32 + 2 * 4) + 128 * 3 * 768 * 2048)
    shapes = 16 * 48 * (4 + 128 * 3)
    floats = 2 * (embedding_and_head + norms + router)
    for group in (32, 128):
        packed = linears // 2 + 2 * linears // group
        assert _num_bytes("Qwen3-30B-A3B", group) == floats + packed + shapes


@pytest.mark.parametrize("model", ["gpt-oss-20b", "Qwen3-30B-A3B"])
def test_a_cut_model_is_served(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    cuts = Cuts(num_layers=1, num_experts=_NUM_EXPERTS[model], vocab_size=600)
    write_full_size_model(folder, model, cuts=cuts)
    expected = {"gpt-oss-20b": "mxfp4", "Qwen3-30B-A3B": "compressed-tensors int4 groups of 32"}
    assert ModelLoader(folder).weight_format == expected[model]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with moe_serve.LLM(str(folder), max_model_len=64) as llm:
        (output,) = llm.generate(["Hello"], params, use_progress_bar=False)
    assert len(output.outputs[0].token_ids) == 4


def test_the_same_seed_gives_the_same_tensors(tmp_path: Path) -> None:
    cuts = Cuts(num_layers=1, num_experts=8, vocab_size=512)
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        write_full_size_model(tmp_path / name, "Qwen3-30B-A3B", cuts=cuts, seed=seed)
    one, two, three = (
        load_file(tmp_path / name / "model.safetensors") for name in ("one", "two", "three")
    )
    assert all(equal(one[name], two[name]) for name in one)
    assert not equal(one["lm_head.weight"], three["lm_head.weight"])


def test_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--layers", "25"], "--layers is 25; this model has 1 to 24"),
        ([], "needs 13.8 GB, but the disk has 1.0 GB free"),
    ):
        monkeypatch.setattr(
            "moe_serve.model.checkpoint.checkpoint_writer.shutil.disk_usage",
            lambda path: type("Usage", (), {"free": 1_000_000_000}),
        )
        arguments = ["script", str(tmp_path / "out"), "--model", "gpt-oss-20b", *flags]
        monkeypatch.setattr("sys.argv", arguments)
        assert main() == 2
        assert message in capsys.readouterr().err
        assert not list(tmp_path.iterdir()), "nothing was kept"
