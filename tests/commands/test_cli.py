"""The commands: flags, exit codes, and one line instead of a traceback."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from moe_serve import __version__
from moe_serve.cli.main import app, main
from moe_serve.cli.serve.foreign_flags import ADVICE
from moe_serve.cli.serve.ready import curl_line, loading_bar, print_ready, server_url
from moe_serve.cli.serve.serve import is_loopback
from moe_serve.cli.serve.server_options import flag_settings
from moe_serve.config.keys import config_keys
from moe_serve.config.sections import Config
from moe_serve.config.sources import load_config, variable_name

ROOT = Path(__file__).resolve().parents[2]

Capture = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    """Returns the exit code of `moe-serve ARGUMENTS`."""
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    code = exit_info.value.code
    assert code is None or isinstance(code, int)
    return code or 0


def flags_of(command: str) -> list[str]:
    group = typer.main.get_group(app)
    parameters = group.commands[command].params
    return sorted(name for parameter in parameters for name in (*parameter.opts,))


def test_the_flags_are_frozen() -> None:
    """A run is a configuration, not a row of flags. A new flag needs a reason and an entry here."""
    assert flags_of("serve") == [
        "--api-key",
        "--attention-ranks",
        "--attention-tp",
        "--autoscale",
        "--batch-policy",
        "--cells",
        "--config",
        "--device",
        "--dtype",
        "--enable-lora",
        "--expert-memory",
        "--expert-ranks",
        "--host",
        "--kv-disk",
        "--kv-disk-bytes",
        "--kv-disk-key-file",
        "--kv-dtype",
        "--kv-events-config",
        "--log-format",
        "--lora-modules",
        "--max-batched-tokens",
        "--max-cells",
        "--max-lora-rank",
        "--max-model-len",
        "--max-num-seqs",
        "--max-queued-requests",
        "--merge-adapter",
        "--metrics-alias",
        "--micro-batches",
        "--num-pages",
        "--num-threads",
        "--otlp-traces-endpoint",
        "--pin-adapter",
        "--placement",
        "--port",
        "--predictor",
        "--print-config",
        "--served-model-name",
        "--speculative-config",
        "--ssl-certfile",
        "--ssl-keyfile",
        "--timeline",
        "model",
    ]
    # Everything that `serve` takes for the model, the limits and HTTP, and what names the nodes.
    assert set(flags_of("launch")) - set(flags_of("serve")) == {
        "--cluster",
        "--coordinator",
        "--emit",
        "--hostfile",
        "--image",
        "--join",
        "--kubernetes-kind",
        "--launcher",
        "--model-claim",
        "--name",
        "--node",
        "--node-rank",
        "--num-nodes",
        "--out",
        "--places",
        "--secret-file",
    }
    assert set(flags_of("serve")) <= set(flags_of("launch"))
    assert flags_of("chat") == [
        "--api-key",
        "--max-tokens",
        "--message",
        "--system",
        "--temperature",
        "--url",
        "-m",
    ]
    assert flags_of("doctor") == ["--config", "--json", "--model"]
    assert flags_of("top") == ["--api-key", "--interval", "--once", "--url"]
    assert flags_of("run-batch") == [
        "--api-key",
        "--concurrency",
        "--config",
        "--input",
        "--model",
        "--output",
        "--url",
        "-i",
        "-o",
    ]
    assert flags_of("timeline") == ["--layers", "--out", "--step", "--steps", "file"]
    assert flags_of("calibrate") == [
        "--device",
        "--http",
        "--layouts",
        "--num-threads",
        "--out",
        "--quick",
        "model",
    ]
    assert flags_of("plan") == [
        "--attainment",
        "--batch",
        "--calibration",
        "--certify",
        "--context",
        "--devices",
        "--fleet",
        "--html",
        "--json",
        "--max-output",
        "--max-prompt",
        "--max-tpot-ms",
        "--memory-bytes",
        "--model",
        "--network",
        "--num-prefixes",
        "--output-tokens",
        "--precision",
        "--prefix-tokens",
        "--processes",
        "--prompt-tokens",
        "--rate",
        "--request-rate",
        "--requests",
        "--routing",
        "--scale-output",
        "--scale-prompt",
        "--scale-time",
        "--seed",
        "--slo",
        "--trace",
        "--trace-start",
    ]
    assert flags_of("simulate") == [
        "--autoscale",
        "--batch-policy",
        "--burstiness",
        "--calibration",
        "--cell-start",
        "--cells",
        "--concurrency",
        "--device",
        "--devices",
        "--duration",
        "--hand-over",
        "--http",
        "--json",
        "--late",
        "--layout",
        "--load",
        "--max-batched-tokens",
        "--max-cells",
        "--max-model-len",
        "--max-num-seqs",
        "--max-output",
        "--max-prompt",
        "--max-requests",
        "--max-wait",
        "--memory-bytes",
        "--micro-batches",
        "--min-cells",
        "--model",
        "--num-pages",
        "--num-prefixes",
        "--order",
        "--output-tokens",
        "--own-machines",
        "--page-link",
        "--page-size",
        "--patience",
        "--period",
        "--plan-out",
        "--precision",
        "--preempt",
        "--prefix-cache",
        "--prefix-tokens",
        "--prompt-tokens",
        "--rate",
        "--redundant-experts",
        "--requests",
        "--routing",
        "--save-requests",
        "--scale-every",
        "--scale-output",
        "--scale-prompt",
        "--scale-time",
        "--scatter",
        "--seed",
        "--slo",
        "--step-budget",
        "--strict",
        "--swing",
        "--target-load",
        "--tensor-shards",
        "--tiers",
        "--timeline",
        "--trace",
        "--trace-start",
        "--train-days",
    ]


def test_version(capsys: Capture) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"moe-serve {__version__}\n"


def test_help_groups_the_commands(capsys: Capture) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    panels, commands = ("Serve", "Plan", "Use", "Inspect"), ("serve", "plan", "chat", "doctor")
    assert all(word in text for word in (*panels, *commands))


def test_doctor_says_why_each_backend_is_on_or_off(capsys: Capture) -> None:
    assert run("doctor", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["memory"]["total_bytes"] > document["memory"]["available_bytes"] > 0
    assert document["cpu"]["usable_threads"] >= 1
    backends = {backend["name"]: backend for backend in document["backends"]}
    assert {"cpu", "oneDNN", "cuda", "triton", "gloo", "nccl", "deepspeed"} <= backends.keys()
    assert all(backend["reason"] for backend in document["backends"])
    assert backends["cpu"]["is_on"] is True
    assert run("doctor") == 0
    assert "oneDNN bfloat16" in capsys.readouterr().out


def test_printed_config_reads_back(capsys: Capture, tmp_path: Path) -> None:
    arguments = ["serve", "my-model", "--port", "8001", "--api-key", "secret", "--num-pages", "9"]
    assert run(*arguments, "--print-config") == 0
    text = capsys.readouterr().out
    assert "secret" not in text
    (tmp_path / "printed.yaml").write_text(text, "utf-8")
    config = load_config(flags={}, environ={}, file=tmp_path / "printed.yaml").config
    assert (config.engine.model.path, config.engine.cache.num_pages) == ("my-model", 9)
    assert (config.server.port, config.server.api_keys) == (8001, ())
    assert run("serve", "--config", str(tmp_path / "printed.yaml"), "--print-config") == 0
    assert f"port: 8001                            # {tmp_path}" in capsys.readouterr().out


def test_print_config_without_flags_is_the_default(capsys: Capture, tmp_path: Path) -> None:
    assert run("serve", "--print-config") == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out, "utf-8")
    assert load_config(flags={}, environ={}, file=tmp_path / "printed.yaml").config == Config()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "70000"], "server.port cannot be 70000 (command line)"),
        (["serve", "--dtype", "int8"], "model.dtype cannot be 'int8'"),
        (["serve", "--micro-batches", "0"], "it takes an integer in [1, 4] or auto"),
        (["serve", "--config", "missing.yaml"], "cannot read the configuration missing.yaml"),
        (["serve", "--api-key", "@missing"], "cannot read the API keys in missing"),
        (["serve", "--host", "0.0.0.0"], "no API key is set: add --api-key KEY"),
        (["serve", "--host", "example.invalid"], "open to other machines, but no API key"),
        (["serve", "--host", "999.1.1.1.1", "--api-key", "k"], "is not an address"),
        (["serve", "--host", "127..0.1", "--api-key", "k"], "127..0.1 is not an address"),
        (["serve", "--host", "192.0.2.1", "--api-key", "k"], "does not have that address"),
        (["serve", "--tensor-parallel-size", "2"], "here: --attention-tp splits"),
        (["serve", "--shutdown-timeout=5"], "here: set server.drain_timeout_s, in the file of"),
        (["launch", "m", "--enable-eplb"], "as MOE_SERVE_CLUSTER_REBALANCE"),
        (["chat", "--api-key", "@missing"], "cannot read the API keys in missing"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: Capture, arguments: list[str], message: str
) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_mistake_cannot_steer_the_terminal(capsys: Capture, tmp_path: Path) -> None:
    for arguments in (
        ["serve", f"{tmp_path}/\x1b]0;title\x07"],
        ["config", "show", "--config", f"{tmp_path}/\x1b]0;title\x07"],
        ["timeline", f"{tmp_path}/\x1b]0;title\x07"],
        ["place", "--trace", f"{tmp_path}/\x1b]0;title\x07", "--devices", "2"],
    ):
        assert run(*arguments) == 2
        said = capsys.readouterr().err
        assert "\x1b" not in said and "\x07" not in said
        assert "\\x1b]0;title\\x07" in said, said


def test_a_wrong_variable_is_a_mistake(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_SERVE_SERVER_PROT", "1")
    assert run("serve", "--print-config") == 2
    assert "did you mean MOE_SERVE_SERVER_PORT?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["serve", "--prot", "1"], ["serve", "--port", "x"], ["x"]])
def test_a_wrong_flag_is_a_usage_error(capsys: Capture, arguments: list[str]) -> None:
    assert run(*arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_what_is_said_of_other_servers_flags_is_there() -> None:
    """The flags, keys, variables and commands that the advice names exist, and none of ours is
    refused."""
    own = {*flags_of("serve"), *flags_of("launch")}
    keys = {key.path: variable_name(key) for key in config_keys()}
    commands = typer.main.get_group(app).commands
    for flag, advice in ADVICE.items():
        assert flag not in own, flag
        assert set(re.findall(r"--[a-z-]+", advice)) <= own, advice
        assert set(re.findall(r"moe-serve (\w+)", advice)) <= set(commands), advice
        named = re.findall(r"\b(?:server|cluster|cache|adapters)\.\w+", advice)
        assert set(named) <= set(keys), advice
        assert set(re.findall(r"MOE_SERVE_\w+", advice)) <= {keys[path] for path in named}


def test_a_taken_port_is_said_before_anything_is_loaded(capsys: Capture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run("serve", "no-such-folder", "--port", str(port)) == 2
    assert f"cannot listen on 127.0.0.1 port {port}: another" in capsys.readouterr().err


def test_ctrl_c_during_imports_is_exit_code_130() -> None:
    script = (
        "import builtins, sys\n"
        "imported = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'typer': raise KeyboardInterrupt\n"
        "    return imported(name, *rest)\n"
        "builtins.__import__ = interrupted\n"
        "import moe_serve.__main__\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_serve.cli.doctor.doctor.look_at_machine", interrupted)
    assert run("doctor") == 130


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{shlex.quote(sys.executable)} -m moe_serve serve --print-config | true"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)]
    + [("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("gpu-1", False)],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_server_url_is_one_that_this_machine_can_ask() -> None:
    assert server_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert server_url("::", 80) == "http://[::1]:80"
    assert server_url("gpu-1", 80) == "http://gpu-1:80"


def test_curl_line_survives_the_shell() -> None:
    line = curl_line("http://127.0.0.1:80", "it's", needs_key=True)
    words = shlex.split(line)
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's"
    assert "Authorization: Bearer $MOE_SERVE_API_KEY" in words
    assert "Authorization" not in curl_line("http://127.0.0.1:80", "m", needs_key=False)


def test_ready_message_does_not_wrap_the_line_to_paste() -> None:
    stream = io.StringIO()
    curl = curl_line("http://127.0.0.1:80", "m" * 90, needs_key=False)
    console = Console(file=stream, width=60)
    print_ready(console, "http://127.0.0.1:80", {"layout": "6 layers"}, curl)
    assert curl in stream.getvalue().splitlines()
    assert "ready at http://127.0.0.1:80" in stream.getvalue()
    with loading_bar(console) as progress:
        assert progress is None, "no bar where nobody watches"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("target", "last"),
    [("serve", "moe-serve serve --port 9"), ("test", "scripts/test --port 9")],
)
def test_make_installs_torch_first(tmp_path: Path, target: str, last: str) -> None:
    """A bare clone gets a virtual environment, then torch alone, then the project, then the
    command."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(
        ["make", "-n", target, "ARGS=--port 9"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    steps = ("-m venv .venv", "--upgrade pip", '"torch>=2.11,<2.14"', "-e ", last)
    places = [done.stdout.find(step) for step in steps]
    assert -1 not in places and places == sorted(places), done.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "takes a JSON object, got 'x'; its keys are method, num_speculative_tokens"),
        ("[]", "takes a JSON object, got '[]'"),
        ('{"num_speculative_tokens": 3}', "needs a method: off, auto, ngram, suffix, head, mtp or"),
        ('{"method": "eagle"}', "speculation.method cannot be 'eagle'"),
        ('{"method": "ngram", "num_speculative_tokens": 99}', "an integer in [1, 16]"),
        ('{"method": "ngram", "x": 1}', "does not take 'x'; its keys are method"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 1}', "the depth is fixed"),
    ],
)
def test_a_wrong_speculative_config_is_a_sentence(capsys: Capture, text: str, words: str) -> None:
    assert run("serve", "--speculative-config", text, "--print-config") == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "takes a JSON object, got 'x'; its keys are enable_kv_cache_events, publisher"),
        ('{"x": 1}', "does not take 'x'; its keys are"),
        ('{"enable_kv_cache_events": 1}', "is 1 and must be true or false"),
        ('{"enable_kv_cache_events": true, "publisher": "nats"}', "must be zmq, or null for none"),
        ('{"enable_kv_cache_events": true, "buffer_steps": 0}', "kv_events.buffer_steps cannot be"),
    ],
)
def test_a_wrong_kv_events_config_is_a_sentence(capsys: Capture, text: str, words: str) -> None:
    assert run("serve", "--kv-events-config", text, "--print-config") == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_vllm_s_keys_of_kv_events_set_ours() -> None:
    on = {"enable_kv_cache_events": True, "publisher": "zmq", "max_queue_size": 9, "topic": ""}
    given = {**on, "replay_endpoint": "tcp://*:5600", "buffer_steps": 7}
    assert flag_settings({"kv_events.endpoint": json.dumps(given)}) == {
        "kv_events.endpoint": "tcp://*:5557",
        "kv_events.replay_endpoint": "tcp://*:5600",
        "kv_events.buffer_steps": 7,
    }
    for off in ({}, {"enable_kv_cache_events": False}, {**on, "publisher": "null"}):
        assert flag_settings({"kv_events.endpoint": json.dumps(off)}) == {}


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp", "glm4_moe_mtp", "exaone_moe_mtp"])
def test_vllm_s_names_of_mtp_are_known(name: str) -> None:
    text = json.dumps({"method": name, "num_speculative_tokens": 2})
    expected = {"speculation.method": "mtp", "speculation.max_tokens": 2}
    assert flag_settings({"speculation.method": text}) == expected


def test_vllm_s_keys_of_speculation_set_ours() -> None:
    text = '{"method": "[ngram]", "num_speculative_tokens": 4, "prompt_lookup_max": 7}'
    assert flag_settings({"speculation.method": text, "server.port": 1}) == {
        "speculation.method": "ngram",
        "speculation.max_tokens": 4,
        "speculation.prompt_lookup_max": 7,
        "server.port": 1,
    }
