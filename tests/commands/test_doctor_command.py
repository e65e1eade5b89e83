"""`moe-serve doctor` and `moe-serve config show`: problems are named, and the exit code is 1."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_serve.cli.doctor import machine_limits
from moe_serve.cli.doctor.doctor_checks import Check, has_problem, machine_checks
from moe_serve.cli.doctor.machine import Backend, MachineReport
from moe_serve.cli.doctor.model_check import check_model
from moe_serve.cli.main import main
from moe_serve.config.sections import CacheConfig, EngineConfig, ModelConfig
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.planning import plan_memory
from tests.support.server.server_process import port_of_ones_own

Capture = pytest.CaptureFixture[str]
GOOD: dict[str, Any] = {
    "limits": {"open_files": 4096, "shared_memory_free_bytes": 2**30},
    "network": {"listen": "127.0.0.1:8000", "port": "free"},
    "clock": {"utc": "now", "synchronised": True},
}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    return int(exit_info.value.code or 0)


def checks_of(section: str = "limits", is_torch_on: bool = True, **facts: Any) -> dict[str, Check]:
    sections = {**GOOD, section: {**GOOD[section], **facts}}
    backends = (
        Backend(name="torch", is_on=is_torch_on, reason="torch cannot be imported: no"),
        Backend(name="llguidance", is_on=False, reason="not installed"),
    )
    report = MachineReport(sections=sections, backends=backends)
    return {check.name: check for check in machine_checks(report)}


@pytest.mark.parametrize(
    ("section", "facts", "name", "state", "text"),
    [
        ("limits", {"open_files": 4096}, "open files", "ok", "enough for 500 streams"),
        ("limits", {"open_files": None}, "open files", "ok", "no limit"),
        ("limits", {"open_files": 256}, "open files", "warning", "enough for 128 streams"),
        ("limits", {"open_files": 64}, "open files", "problem", "`ulimit -n 628`"),
        ("limits", {"shared_memory_free_bytes": 2**20}, "shared memory", "warning", "--shm-size"),
        ("limits", {"shared_memory_free_bytes": None}, "shared memory", "ok", "no /dev/shm"),
        ("network", {"port": "taken by another program"}, "port", "warning", "choose another"),
        ("clock", {"synchronised": False}, "clock", "warning", "synchronised"),
        ("clock", {"synchronised": None}, "clock", "ok", "it is unknown whether"),
        ("clock", {}, "llguidance", "warning", "no structured output: not installed"),
    ],
)
def test_what_is_made_of_the_facts(
    section: str, facts: dict[str, Any], name: str, state: str, text: str
) -> None:
    check = checks_of(section, **facts)[name]
    assert (check.state, text in check.text) == (state, True), check


def test_only_a_problem_is_a_problem() -> None:
    assert not has_problem(list(checks_of().values()))
    without = checks_of(is_torch_on=False)
    assert has_problem(list(without.values()))
    assert without["torch"].text == "torch cannot be imported: no"


def test_a_problem_is_exit_code_1(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    report = MachineReport(sections={**GOOD}, backends=())
    few = {**GOOD, "limits": {**GOOD["limits"], "open_files": 10}}
    for sections, code in ((GOOD, 0), (few, 1)):
        found = replace(report, sections=sections)
        monkeypatch.setattr("moe_serve.cli.doctor.doctor.look_at_machine", lambda *_, it=found: it)
        assert run("doctor", "--json") == code
        checks = {c["name"]: c for c in json.loads(capsys.readouterr().out)["checks"]}
        assert checks["open files"]["state"] == ("problem" if code else "ok")


def test_a_working_folder_that_is_gone_is_a_sentence(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    try:
        assert run("doctor") == 2
    finally:
        monkeypatch.undo()
    assert "error: the working folder has been deleted" in capsys.readouterr().err


def test_the_limits_of_this_machine() -> None:
    facts = machine_limits.limits()
    assert facts["open_files"] is None or int(str(facts["open_files"])) > 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        in_use = machine_limits.network(*taken.getsockname())
    assert in_use["port"] == "taken by another program"
    assert machine_limits.network("127.0.0.1", port_of_ones_own())["port"] == "free"
    for host in ("999.1.1.1", "127..0.1"):
        assert "not usable" in str(machine_limits.network(host, 1)["port"])
    assert machine_limits.network("127.0.0.1", 0)["port"] == "any free one"
    assert machine_limits.clock()["synchronised"] in (True, False, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demonstration model."""
    return Path(shutil.copytree(demo_model_folder(), tmp_path / "model"))


def found(folder: Path, **cache: Any) -> dict[str, Check]:
    config = EngineConfig(model=ModelConfig(path=str(folder)), cache=CacheConfig(**cache))
    return {check.name: check for check in check_model(config).checks}


def test_a_good_model(folder: Path) -> None:
    checks = found(folder)
    assert {check.state for check in checks.values()} == {"ok"}
    assert checks.keys() == {"tokenizer", "weights", "memory"}
    assert "KV pages" in checks["memory"].text


def test_what_a_model_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is not a folder" in found(folder / "no")["model"].text
    weights = next(folder.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert found(folder)["weights"].state == "problem"
    weights.unlink()
    assert found(folder)["weights"].state == "problem"
    weights.write_bytes(whole)
    (folder / "tokenizer.json").unlink()
    assert found(folder)["tokenizer"].state == "problem"
    assert found(folder, num_pages=1)["memory"].state == "problem", "no request fits"
    monkeypatch.setattr(plan_memory, "free_bytes", lambda _: 2**20)
    memory = found(folder, num_pages=1000)["memory"]
    assert memory.state == "problem" and "does not fit" in memory.text
    needed = 2**30
    monkeypatch.setattr(plan_memory, "free_bytes", lambda _: needed)
    assert found(folder, memory_bytes=int(needed * 0.9))["memory"].state == "warning"


def test_a_model_without_a_template(folder: Path) -> None:
    for name in ("chat_template.jinja", "chat_template.json"):
        (folder / name).unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    if file.exists():
        settings = json.loads(file.read_text("utf-8"))
        settings.pop("chat_template", None)
        file.write_text(json.dumps(settings), "utf-8")
    check = found(folder)["chat template"]
    assert check.state == "warning" and "/v1/completions works" in check.text


def test_config_show(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    text = "scheduler:\n  max_num_seqs: 7\n  tiers: {chat: {weight: 2}}\n"
    file.write_text(f"{text}server:\n  api_keys: [very-secret]\n", "utf-8")
    monkeypatch.setenv("MOE_SERVE_SERVER_PORT", "8123")
    assert run("config", "show", "--config", str(file), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["scheduler.max_num_seqs"] == {"value": 7, "source": f"{file}:2"}
    assert shown["scheduler.tiers"]["value"] == {"chat": {"weight": 2.0}}
    assert shown["server.port"] == {"value": 8123, "source": "MOE_SERVE_SERVER_PORT"}
    assert shown["server.api_keys"]["value"] == "1 set, not shown"
    assert shown["model.dtype"] == {"value": "auto", "source": "default"}
    assert run("config", "show", "--config", str(file), "--changed") == 0
    text = capsys.readouterr().out
    assert "max_num_seqs: 7" in text and "port: 8123" in text and "dtype" not in text
    assert "very-secret" not in text + json.dumps(shown)
    monkeypatch.delenv("MOE_SERVE_SERVER_PORT")
    assert run("config", "show", "--changed") == 0
    assert capsys.readouterr().out == "# every key has its default\n"
    assert run("config", "show", "--config", "missing.yaml") == 2
