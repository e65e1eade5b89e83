"""`moe-serve launch`: its input, refusals and output. Other tests start what it emits."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from moe_serve.cli.launch import launch
from moe_serve.cli.launch.launch_node import config_of_node_0, find_secret
from moe_serve.cli.launch.launch_options import LaunchOptions, LaunchRequest, launch_request
from moe_serve.cli.main import main
from moe_serve.cli.options import build_options, setting_keys
from moe_serve.cli.serve.serve import ServeOptions
from moe_serve.cluster.control.rank_name import RankName, all_ranks
from moe_serve.cluster.launch.hosts import own_address
from moe_serve.cluster.launch.launchers import HostCommand
from moe_serve.cluster.launch.node_layout import share_out
from moe_serve.config.keys import config_keys
from moe_serve.config.sections import Config
from moe_serve.config.sources import load_config
from moe_serve.config.tiers import TierConfig
from moe_serve.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TWO_NODES = ROOT / "configs" / "clusters" / "two-nodes.yaml"
RANKS = ("--attention-ranks", "1", "--expert-ranks", "2")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "LWS_", "GROUP_"))]:
        monkeypatch.delenv(name)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["launch", *arguments])
    code = exit_info.value.code
    assert code is None or isinstance(code, int)
    return code or 0


def request(**given: object) -> LaunchRequest:
    return launch_request(build_options(LaunchOptions, {"image": "i", **given}))


@pytest.mark.parametrize("kind", [ServeOptions, LaunchOptions])
def test_every_setting_has_its_key(kind: type) -> None:
    known = {key.path for key in config_keys()}
    assert set(setting_keys(kind).values()) <= known


def test_speculation_reaches_every_node() -> None:
    text = '{"method": "auto"}'
    made = request(model="m", attention_ranks=1, expert_ranks=2, speculative_config=text)
    assert made.settings["speculation.method"] == "auto"
    words = made.command.arguments(node_rank=1)
    assert words[words.index("--speculative-config") + 1] == text


def test_the_same_command_reads_back() -> None:
    made = request(model="m", attention_ranks=1, expert_ranks=2, num_pages=9, api_key=["@k", "@l"])
    assert made.command.arguments(node_rank=1) == (
        "launch", "m", "--attention-ranks", "1", "--expert-ranks", "2", "--node-rank", "1",
        "--num-pages", "9", "--api-key", "@k", "--api-key", "@l",
    )  # fmt: skip


def test_adapters_reach_every_node() -> None:
    made = request(
        model="m",
        attention_ranks=1,
        expert_ranks=2,
        enable_lora=True,
        lora_modules=["a=x", "b=y"],
        pin_adapters=["a"],
    )
    assert made.settings["adapters.modules"] == ["a=x", "b=y"]
    assert made.command.arguments(node_rank=1)[-7:] == (
        "--enable-lora", "--lora-modules", "a=x", "--lora-modules", "b=y", "--pin-adapter", "a",
    )  # fmt: skip


def test_a_nodes_view_can_be_printed(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"SLURM_JOB_ID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2"}
    variables["SLURM_JOB_NODELIST"] = "n[1-2]"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run("m", *RANKS, "--port", "9000", "--print-config") == 0
    text = capsys.readouterr().out
    assert "# this is node 1 of 2 (slurm), node 0 is at n1:29601" in text
    assert "# node 0: attention 0, expert 0\n# node 1: expert 1\n" in text
    assert yaml.safe_load(text)["server"]["port"] == 9000


def test_a_cluster_file_says_it_all(capsys: Capture) -> None:
    assert run("--cluster", str(TWO_NODES), "--node-rank", "1", "--print-config") == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert document["cluster"]["attention_ranks"] == document["cluster"]["expert_ranks"] == 4
    assert document["scheduler"]["max_num_seqs"] == 256
    assert document["model"]["path"] == "/models/Qwen3-30B-A3B"


def test_flags_and_environment_win_over_a_cluster_file(monkeypatch: pytest.MonkeyPatch) -> None:
    made = request(cluster=TWO_NODES, model="other", port=1)
    config = made.load({"MOE_SERVE_SCHEDULER_MAX_NUM_SEQS": "7"}).config
    assert (config.engine.model.path, config.server.port) == ("other", 1)
    assert config.engine.scheduler.max_num_seqs == 7
    assert made.devices()[RankName("expert", 3)] == 3


def test_a_cluster_files_unknown_setting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(TWO_NODES.read_text().replace("max_num_seqs", "max_num_seq"))
    with pytest.raises(ConfigError, match=r"scheduler.max_num_seq .*c.yaml.*did you mean"):
        request(cluster=path).load({})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m"], "a launch needs --attention-ranks and --expert-ranks, at least 1 each"),
        (["m", *RANKS, "--node-rank", "0"], "--num-nodes, --coordinator HOST:PORT are missing"),
        (["m", *RANKS, "--api-key", "secret"], "--api-key @FILE"),
        (["m", *RANKS, "--node", "b"], "--node and --places belong to --join HOST:PORT"),
        (["--join", "h:1", *RANKS], "leave out the number of ranks or cells"),
        (["--join", "h:1", "--num-nodes", "2"], "leave out --num-nodes"),
        (["--join", "h:1", "--node", "7"], "'7' cannot name a node"),
        (["--join", "nowhere", "--node", "b"], "'nowhere' (--join) is not HOST:PORT"),
        (["--cluster", "none.yaml"], "cannot read the cluster file none.yaml"),
        (
            ["--cluster", str(TWO_NODES), "--node-rank", "0", "--expert-ranks", "3"],
            "places 4 attention and 4 expert ranks, but the flags request 4 and 3",
        ),
        (["m", *RANKS, "--hostfile", "none"], "cannot read the hostfile none"),
        (["m", *RANKS, "--emit", "slurm"], "--num-nodes or --cluster"),
        (["m", *RANKS, "--emit", "shell", "--num-nodes", "2"], "give --coordinator HOST:PORT"),
        (["m", *RANKS, "--emit", "slurm", "--num-nodes", "4"], "leave 1 of 4 nodes without any"),
        (["m", *RANKS, "--num-nodes", "2", "--emit", "slurm", "--name", "A"], "cannot name"),
    ],
)
def test_a_mistake_is_one_line(capsys: Capture, arguments: list[str], message: str) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_nodes_need_a_secret(capsys: Capture) -> None:
    at = ("--node-rank", "1", "--num-nodes", "2", "--coordinator", "10.0.0.1:7000")
    assert run("m", *RANKS, *at) == 2
    assert "the nodes need a secret that all share" in capsys.readouterr().err


def test_a_secret_file_reaches_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x" * 40 + "\n")
    environ: dict[str, str] = {}
    secret = find_secret(path, environ, is_needed=True)
    assert secret.text == "x" * 40 and environ == secret.environment()


def test_only_one_process_of_a_node_stays(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "h")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert run("m", *RANKS) == 0
    assert "so this one exits" in capsys.readouterr().out


def test_a_node_that_does_not_find_node_0(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_SERVE_CLUSTER_SECRET", "x" * 40)
    monkeypatch.setenv("MOE_SERVE_CLUSTER_START_TIMEOUT_S", "1")
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    at = ("--node-rank", "1", "--num-nodes", "2", "--coordinator", "127.0.0.1:9")
    assert run("m", *RANKS, *at) == 1, "not a mistake in what was asked for"
    assert "node 1 does not find node 0 at 127.0.0.1:9" in capsys.readouterr().err


def test_a_node_that_joins_says_what_it_looks_for(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_SERVE_CLUSTER_SECRET", "x" * 40)
    monkeypatch.setenv("MOE_SERVE_CLUSTER_START_TIMEOUT_S", "1")
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    assert run("--join", "127.0.0.1:9", "--node", "n", "--places", "1") == 1
    captured = capsys.readouterr()
    assert "node n looks for the launch at 127.0.0.1:9, for up to 1 s" in captured.out
    assert "node n does not find node 0 at 127.0.0.1:9" in captured.err


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "systemd", "shell"])
def test_files_are_written(capsys: Capture, tmp_path: Path, kind: str) -> None:
    at = ("--num-nodes", "2", "--coordinator", "10.0.0.1:7000", "--name", "pair")
    assert run("m", *RANKS, *at, "--emit", kind, "--out", str(tmp_path / "out")) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert written and all(path.parent == tmp_path / "out" for path in written)
    for path in written:
        text = path.read_text()
        assert "pair" in text
        assert (path.suffix in (".sh", ".sbatch")) == os.access(path, os.X_OK)
        if path.suffix in (".sh", ".sbatch"):
            assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


def test_a_file_is_no_folder_to_write_into(capsys: Capture, tmp_path: Path) -> None:
    asked = ("m", *RANKS, "--num-nodes", "2", "--emit", "slurm", "--out")
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert run(*asked, str(taken)) == 2
    assert capsys.readouterr().err == (
        f"error: --out {taken} is a file, but it must be a folder into which the files are "
        "written: name another, or remove the file.\n"
    )
    assert taken.read_text() == "mine"


def test_manifests_of_a_cluster_file(capsys: Capture, tmp_path: Path) -> None:
    """The file's settings travel as variables; its layout must be the one that the nodes derive."""
    split = "attention_ranks: [{0}]\n    expert_ranks: [{0}]"
    even = TWO_NODES.read_text()
    even = even.replace(split.format("0, 1"), "attention_ranks: [0, 1, 2, 3]")
    even = even.replace(split.format("2, 3"), "expert_ranks: [0, 1, 2, 3]")
    limit = "    max_num_seqs: 256\n"
    even = even.replace(limit, f"{limit}    tiers: {{chat: {{weight: 2, ttft_s: 1}}}}\n")
    path = tmp_path / "even.yaml"
    path.write_text(even + "  log: {access_exclude: []}\n")
    assert run("--cluster", str(path), "--emit", "kubernetes") == 0
    text = capsys.readouterr().out
    (lws, _) = yaml.safe_load_all(text)
    template = lws["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    (container,) = template["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["MOE_SERVE_SCHEDULER_MAX_NUM_SEQS"] == "256"
    tiers = variables["MOE_SERVE_SCHEDULER_TIERS"]
    read = load_config(flags={}, environ={"MOE_SERVE_SCHEDULER_TIERS": tiers})
    assert read.config.engine.scheduler.tiers == (TierConfig(name="chat", weight=2, ttft_s=1),)
    assert variables["MOE_SERVE_LOG_ACCESS_EXCLUDE"] == "[]", "an empty one would not be set"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    words = container["command"]
    assert words[:3] == ["moe-serve", "launch", "/models/Qwen3-30B-A3B"]
    assert "--cluster" not in words and words[-2:] == ["--host", "0.0.0.0"]
    assert run("--cluster", str(TWO_NODES), "--emit", "slurm") == 2
    assert "places ranks otherwise" in capsys.readouterr().err


def test_a_hostfile_starts_every_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("me@a slots=2\nb slots=1\n")
    started: list[HostCommand] = []

    def start(commands: tuple[HostCommand, ...]) -> int:
        started.extend(commands)
        return 5

    monkeypatch.setattr(launch, "run_on_hosts", start)
    assert run("m", *RANKS, "--hostfile", str(hostfile)) == 5
    assert [command.name for command in started] == ["me@a", "b"]
    assert all("--coordinator a:29600" in command.argv[-1] for command in started)
    assert (
        run("m", "--attention-ranks", "3", "--expert-ranks", "2", "--hostfile", str(hostfile)) == 2
    )
    assert "me@a would get 3 ranks and has 2 slots" in capsys.readouterr().err
    assert run("m", *RANKS, "--hostfile", str(hostfile), "--num-nodes", "3") == 2
    assert "leave --node-rank and --num-nodes out" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("deepspeed") is not None, reason="deepspeed is installed")
def test_deepspeed_is_asked_for_when_it_is_missing(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=1\n")
    where = ("--hostfile", str(tmp_path / "hosts"), "--launcher", "deepspeed")
    assert run("m", *RANKS, *where) == 2
    assert "pip install 'moe-serve[deepspeed]', or use --launcher ssh" in capsys.readouterr().err


def test_node_0_shares_its_cores_among_its_ranks() -> None:
    config = config_of_node_0(Config(), share_out(all_ranks(1, 3), 2), "10.0.0.1")
    assert config.engine.cluster.host == "10.0.0.1"
    assert config.engine.model.num_threads == max(1, (os.cpu_count() or 1) // 2)


def test_node_0_listens_where_others_reach_it() -> None:
    names = {"a": ["127.0.1.1", "10.0.0.1"], "b": ["127.0.1.1"], "c": ["fe80::1%eth0"]}
    assert own_address("a", 2, names.__getitem__) == "10.0.0.1"
    assert own_address("b", 1, names.__getitem__) == "127.0.1.1"
    assert own_address("c", 2, names.__getitem__) == "fe80::1%eth0"
    with pytest.raises(ConfigError, match="b is 127.0.1.1 on this node, which the other 1 cannot"):
        own_address("b", 2, names.__getitem__)
    with pytest.raises(ConfigError, match="host no.invalid has no address here"):
        own_address("no.invalid", 2)


def test_cells_fill_the_nodes_one_after_another(capsys: Capture) -> None:
    """With --cells or in the file; a file that numbers the ranks of one cell serves for several."""
    cells = ("--cells", "1x(1A2E prefill) 1x(1A1E decode)")
    nodes = ("--num-nodes", "2", "--node-rank", "1", "--coordinator", "10.0.0.1:29600")
    assert run(*cells, *nodes, "--print-config") == 0
    printed = capsys.readouterr().out
    assert "# node 0: attention 0, expert 0-1\n# node 1: attention 1, expert 2\n" in printed
    assert "layout: 1x(1A2E prefill) 1x(1A1E decode)" in printed
    file = ("--cluster", str(TWO_NODES), "--node-rank", "0")
    assert run(*file, "--cells", "2x(2A2E)", "--print-config") == 0
    assert "# node 1: attention 2-3, expert 2-3\n" in capsys.readouterr().out
    assert run(*file, "--cells", "3x(2A2E)", "--print-config") == 2
    assert "places 4 attention and 4 expert ranks" in capsys.readouterr().err
