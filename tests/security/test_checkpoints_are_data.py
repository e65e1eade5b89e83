"""A checkpoint is data: no code in its folder runs, and nothing is fetched while it loads."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

import forbidden_calls
from moe_serve.config.sections import CacheConfig, EngineConfig, ModelConfig
from moe_serve.engine.build import build_engine
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.tokenizer import Tokenizer
from tests.support.security.real_server import BOTH, RealServer, refused

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("moe_serve", "experts", "routing_predictor", "kernels/moe_kernels")


def test_no_line_of_ours_makes_code_of_data() -> None:
    """CVE-2025-32444, CVE-2026-3059, CVE-2026-14890, CVE-2026-15969 (allow lists of pickle),
    CVE-2026-27893, PYSEC of `torch.load`: no pickle, eval, `torch.load` or shell in the tree."""
    found = [
        f"{path}:{line} {what}"
        for root in PACKAGES
        for path in (ROOT / root).rglob("*.py")
        for line, what in forbidden_calls.findings(_tree(path))
    ]
    assert found == []


def _tree(path: Path) -> Any:
    import ast

    return ast.parse(path.read_text("utf-8"))


def test_no_sparse_tensors_and_no_pyobj() -> None:
    """CVE-2026-73557 (a global switch of sparse checks), CVE-2025-62164: neither is used at all."""
    # The test fails where a file of ours holds one of these names; nothing here calls them.
    words = re.compile(r"sparse_coo|sparse_csr|check_sparse|Unpickler|recv_pyobj|weights_only")
    for root in PACKAGES:
        for path in (ROOT / root).rglob("*.py"):
            assert not words.search(path.read_text("utf-8")), path


def test_code_beside_a_checkpoint_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CVE-2026-27893, CVE-2026-47155, Nemotron's auto_map: the model loads, without its code and
    without the network."""
    folder, made = tmp_path / "model", tmp_path / "made"
    shutil.copytree(demo_model_folder(), folder)
    code = f"open({str(made)!r}, 'w')\n"
    for name in (
        "modeling_evil.py",
        "configuration_evil.py",
        "tokenization_evil.py",
        "conftest.py",
    ):
        (folder / name).write_text(code)
    auto = {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M",
            "AutoTokenizer": ["tokenization_evil.T", None]}  # fmt: skip
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        content |= {"auto_map": auto, "trust_remote_code": True, "_commit_hash": "main"}
        (folder / name).write_text(json.dumps(content))

    def refuse(*_: object) -> None:
        raise AssertionError("loading asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model = ModelConfig(path=str(folder), num_threads=1)
    built = build_engine(EngineConfig(model=model, cache=CacheConfig(num_pages=128)))
    assert built.layout.vocab_size == 4096
    assert Tokenizer.load(folder).encode("hi")
    assert not made.exists(), "code of the checkpoint has run"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "a.ckpt"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    """CVE-2026-15976, CVE-2025-32434 (`weights_only=True` that runs code): only safetensors."""
    folder = tmp_path / "model"
    shutil.copytree(demo_model_folder(), folder, ignore=shutil.ignore_patterns("predictor"))
    (folder / "model.safetensors").unlink()
    made = tmp_path / "made"
    (folder / name).write_bytes(b"\x80\x04cbuiltins\nopen\n(V" + str(made).encode() + b"\nVw\ntR.")
    with pytest.raises(CheckpointError, match=r"pickled weights"):
        build_engine(EngineConfig(model=ModelConfig(path=str(folder), num_threads=1)))
    assert not made.exists()


@pytest.mark.parametrize("route", BOTH)
def test_a_request_chooses_no_code(server: RealServer, route: str) -> None:
    """CVE-2026-114053, CVE-2026-27893: no field of a request names a repository, revision or
    folder."""
    for name in ("trust_remote_code", "revision", "code_revision", "tokenizer_revision", "repo_id"):
        assert refused(server.post(route, **{name: "main"}), 400)["code"] == "unknown_parameter"
    for model in ("org/model", "../..", "file:///etc", "demo@main", "demo:main", "demo\x00"):
        assert refused(server.post(route, model=model), 404)["code"] == "model_not_found"
