"""What is emitted can be read by what it is for, starts the right command, and holds no secret."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_serve.cluster.launch.deployment import Deployment, LaunchCommand
from moe_serve.cluster.launch.emit.kubernetes import KubernetesKind, kubernetes_files
from moe_serve.cluster.launch.emit.scripts import (
    shell_files,
    slurm_files,
    systemd_files,
    systemd_quote,
)
from moe_serve.cluster.launch.environment import detect_node
from moe_serve.cluster.launch.hosts import HostPort
from moe_serve.errors import ConfigError
from moe_serve.http.gate.auth import OPEN_PATHS

ROOT = Path(__file__).resolve().parents[4]
# Everything that a shell, systemd or Kubernetes could mistake for something else.
ODD = '/models/it\'s $HOME 100% "of" $(x) \\ ü'
COMMAND = LaunchCommand(
    model=ODD,
    attention_ranks=2,
    expert_ranks=3,
    secret_file="/etc/secret",
    serve_flags=("--host", "0.0.0.0", "--port", "9000"),
)
DEPLOYMENT = Deployment(
    name="pair",
    num_nodes=2,
    command=COMMAND,
    coordinator=HostPort("10.0.0.1", 7000),
    http_port=9000,
    num_devices=4,
    variables={"MOE_SERVE_SCHEDULER_MAX_NUM_SEQS": "64", "MOE_SERVE_SERVER_IS_STRICT": "a 'b' $c"},
    model_claim="weights",
)
KINDS: tuple[KubernetesKind, ...] = ("leader-worker-set", "stateful-set")


def all_files(deployment: Deployment) -> Mapping[str, str]:
    return {
        **slurm_files(deployment),
        **shell_files(deployment),
        **systemd_files(deployment),
        **{f"{kind}-{name}": text for kind in KINDS for name, text in manifests(kind).items()},
    }


def manifests(kind: KubernetesKind) -> Mapping[str, str]:
    return kubernetes_files(DEPLOYMENT, kind)


def parsed(kind: KubernetesKind) -> dict[str, dict[str, Any]]:
    (text,) = manifests(kind).values()
    return {f"{doc['kind']} {doc['metadata']['name']}": doc for doc in yaml.safe_load_all(text)}


def run_script(path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs it with programs of ours in front of the PATH: they print their arguments, one a
    line."""
    for name in ("moe-serve", "srun"):
        program = path.parent / name
        program.write_text(
            "#!/bin/sh\nprintf '%s\\n' \"$MOE_SERVE_CLUSTER_SECRET\" "
            '"$MOE_SERVE_SERVER_IS_STRICT" "$@"\n'
        )
        program.chmod(0o755)
    return subprocess.run(
        ["bash", str(path), *arguments],
        env={"PATH": f"{path.parent}:/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_file_holds_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_SERVE_CLUSTER_SECRET", "s" * 40)
    for name, text in all_files(DEPLOYMENT).items():
        assert "s" * 40 not in text, name
        assert "{" not in text.replace("${", "").replace("kubectl", "") or name.endswith("yaml"), (
            name
        )


@pytest.mark.parametrize("name", ["pair.sbatch", "pair.sh"])
def test_scripts_are_valid(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(all_files(DEPLOYMENT)[name])
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_batch_script_starts_one_task_on_each_node(tmp_path: Path) -> None:
    path = tmp_path / "pair.sbatch"
    path.write_text(slurm_files(DEPLOYMENT)["pair.sbatch"])
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_ON_NODE": "16"}
    done = run_script(path, **slurm)
    assert done.returncode == 0, done.stderr
    _, secret, strict, *words = done.stdout.splitlines()
    assert re.fullmatch(r"[0-9a-f]{64}", secret), "a secret of the job's own"
    assert strict == "a 'b' $c"
    start = words.index("moe-serve")
    assert {"--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=16"} <= set(words[:start])
    assert words[start + 1 :] == list(COMMAND.arguments())
    given = run_script(path, **slurm, MOE_SERVE_CLUSTER_SECRET="@/etc/secret")
    assert given.stdout.splitlines()[1] == "@/etc/secret"


def test_batch_directives_come_before_the_first_command() -> None:
    lines = slurm_files(DEPLOYMENT)["pair.sbatch"].splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(directives) < first
    assert "#SBATCH --gpus-per-node=4" in lines and "#SBATCH --nodes=2" in lines


def test_the_shell_script_takes_the_node(tmp_path: Path) -> None:
    path = tmp_path / "pair.sh"
    path.write_text(shell_files(DEPLOYMENT)["pair.sh"])
    done = run_script(path, "1")
    assert done.returncode == 0, done.stderr
    expected = COMMAND.arguments(node_rank=1, num_nodes=2, coordinator="10.0.0.1:7000")
    assert done.stdout.splitlines()[2:] == list(expected)
    for wrong in ([], ["2"], ["-1"], ["x"], ["0", "1"]):
        assert run_script(path, *wrong).returncode == 2, wrong


def test_the_shell_script_asks_for_the_secret(tmp_path: Path) -> None:
    plain = LaunchCommand(model="m", attention_ranks=1, expert_ranks=1)
    deployment = Deployment(name="pair", num_nodes=2, command=plain, coordinator=HostPort("h", 1))
    path = tmp_path / "pair.sh"
    path.write_text(shell_files(deployment)["pair.sh"])
    done = run_script(path, "0")
    assert done.returncode == 2 and "set MOE_SERVE_CLUSTER_SECRET" in done.stderr
    assert run_script(path, "0", MOE_SERVE_CLUSTER_SECRET="x").returncode == 0


def test_systemd_units_start_the_command() -> None:
    files = systemd_files(DEPLOYMENT)
    assert set(files) == {"pair-0.service", "pair-1.service", "pair.env.example"}
    unit = files["pair-1.service"]
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    assert unsystemd(line.removeprefix("ExecStart=")) == [
        "/usr/bin/env",
        "moe-serve",
        *COMMAND.arguments(node_rank=1, num_nodes=2, coordinator="10.0.0.1:7000"),
    ]
    assert "EnvironmentFile=/etc/moe-serve/pair.env" in unit


def unsystemd(text: str) -> list[str]:
    """Undo systemd's quoting, as its manual describes it: C escapes inside quotes, %% and $$."""
    words = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', text)
    plain = [re.sub(r"\\(.)", r"\1", word[1:-1]) if word[0] == '"' else word for word in words]
    return [word.replace("%%", "%").replace("$$", "$") for word in plain]


@pytest.mark.parametrize(
    "word", ["plain", "", "a b", "100%", 'say "x"', "back\\slash", "it's", "a;b"]
)
def test_quoting_for_systemd(word: str) -> None:
    assert unsystemd(systemd_quote(word)) == [word]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for name, text in systemd_files(DEPLOYMENT).items():
        (tmp_path / name).write_text(text)
    units = sorted(str(path) for path in tmp_path.glob("*.service"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *units],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "pair-" in line]
    assert said == [], "\n".join(said)


@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_whole(kind: KubernetesKind) -> None:
    for name, document in parsed(kind).items():
        assert {"apiVersion", "kind", "metadata", "spec"} <= document.keys(), name
    (text,) = manifests(kind).values()
    assert "&id" not in text and "*id" not in text, "no anchors: people read and change this"


def pods_of(kind: KubernetesKind) -> dict[str, dict[str, Any]]:
    """{"leader": pod template, ...}."""
    documents = parsed(kind)
    if kind == "stateful-set":
        return {"all": documents["StatefulSet pair"]["spec"]["template"]}
    template = documents["LeaderWorkerSet pair"]["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    return {"leader": template["leaderTemplate"], "worker": template["workerTemplate"]}


@pytest.mark.parametrize("kind", KINDS)
def test_pods_take_their_secrets_by_reference(kind: KubernetesKind) -> None:
    for pod in pods_of(kind).values():
        (container,) = pod["spec"]["containers"]
        entries = {entry["name"]: entry for entry in container["env"]}
        for name, key in (
            ("MOE_SERVE_CLUSTER_SECRET", {"key": "cluster-secret"}),
            ("MOE_SERVE_SERVER_API_KEYS", {"key": "api-keys"}),
            ("MOE_SERVE_SERVER_ADMIN_KEYS", {"key": "admin-keys", "optional": True}),
        ):
            assert entries[name] == {
                "name": name,
                "valueFrom": {"secretKeyRef": {"name": "pair", **key}},
            }
        assert entries["MOE_SERVE_SCHEDULER_MAX_NUM_SEQS"]["value"] == "64"
        assert pod["spec"]["enableServiceLinks"] is False, "else MOE_SERVE_PORT and the like appear"
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}


@pytest.mark.parametrize("kind", KINDS)
def test_services_select_pods_that_exist(kind: KubernetesKind) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods_of(kind).values()]
    for name, document in parsed(kind).items():
        if document["kind"] != "Service":
            continue
        selector = document["spec"]["selector"]
        if selector == {"statefulset.kubernetes.io/pod-name": "pair-0"}:
            continue  # a label that Kubernetes sets itself
        assert any(selector.items() <= label.items() for label in labels), name


def test_every_pod_finds_its_node() -> None:
    """The command of the StatefulSet, in the environment that Kubernetes makes."""
    documents = parsed("stateful-set")
    spec = documents["StatefulSet pair"]["spec"]
    assert spec["podManagementPolicy"] == "Parallel", "node 0 waits for the others"
    service = documents[f"Service {spec['serviceName']}"]["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    (container,) = spec["template"]["spec"]["containers"]
    words = [word.replace("$$", "$") for word in container["command"]]
    at = "pair-0.pair-nodes:7000"
    assert words == ["moe-serve", *COMMAND.arguments(num_nodes=2, coordinator=at)]
    assert {port["containerPort"] for port in container["ports"]} == {7000, 9000}


@pytest.mark.parametrize("kind", KINDS)
def test_pods_get_variables_as_they_stand(kind: KubernetesKind) -> None:
    """Kubernetes replaces $(NAME) in values too, and makes one dollar of two."""
    deployment = dataclasses.replace(DEPLOYMENT, variables={"MOE_SERVE_PREDICTOR_PATH": ODD})
    (text,) = kubernetes_files(deployment, kind).values()
    (found,) = set(re.findall(r"name: MOE_SERVE_PREDICTOR_PATH\n\s+value: (.+)\n", text))
    value = re.sub(r"\$(\$|\(\w+\))", lambda m: "$" * (m[1] == "$"), yaml.safe_load(found))
    assert value == ODD


def test_a_leader_is_ready_when_the_server_is() -> None:
    pods = pods_of("leader-worker-set")
    (leader,) = pods["leader"]["spec"]["containers"]
    (worker,) = pods["worker"]["spec"]["containers"]
    probes = {"startupProbe": "live", "livenessProbe": "live", "readinessProbe": "ready"}
    for probe, route in probes.items():
        asked = {"path": f"/health/{route}", "port": "http", "scheme": "HTTP"}
        assert leader[probe]["httpGet"] == asked and f"/health/{route}" in OPEN_PATHS
        assert probe not in worker
    assert leader["command"] == worker["command"], "the same command on every node"
    environ = {"LWS_LEADER_ADDRESS": "pair-0.pair", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    assert detect_node(environ, "pair-0-1").node_rank == 1


@pytest.mark.parametrize(("scheme", "asked"), [("HTTPS", ["HTTPS"] * 3), (None, [])])
def test_probes_speak_as_the_server_does(scheme: Any, asked: list[str]) -> None:
    deployment = dataclasses.replace(DEPLOYMENT, probe_scheme=scheme)
    (text,) = kubernetes_files(deployment, "leader-worker-set").values()
    leader = next(yaml.safe_load_all(text))["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    (container,) = leader["spec"]["containers"]
    probes = [value for key, value in container.items() if key.endswith("Probe")]
    assert [probe["httpGet"]["scheme"] for probe in probes] == asked


@pytest.mark.parametrize("kind", KINDS)
def test_pods_are_held_as_those_of_deploy(kind: KubernetesKind) -> None:
    """The one-host manifests are written by hand; what is emitted must not be laxer."""
    text = (ROOT / "deploy" / "kubernetes" / "gpu.yaml").read_text("utf-8")
    by_hand = yaml.safe_load(text)["spec"]["template"]["spec"]
    (ours,) = by_hand["containers"]
    for pod in pods_of(kind).values():
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["securityContext"] == by_hand["securityContext"]
        assert container["securityContext"] == ours["securityContext"]
        assert container["lifecycle"] == ours["lifecycle"]
        assert container["image"] == ours["image"]
        writable = {m["mountPath"] for m in ours["volumeMounts"] if not m.get("readOnly")}
        assert writable <= {mount["mountPath"] for mount in container["volumeMounts"]}


def test_units_are_ended_as_that_of_deploy() -> None:
    by_hand = (ROOT / "deploy" / "systemd" / "moe-serve.service").read_text("utf-8").splitlines()
    emitted = systemd_files(DEPLOYMENT)["pair-1.service"].splitlines()
    shared = (
        "Type=", "Restart=", "RestartSec=", "RestartPreventExitStatus=", "SuccessExitStatus=",
        "KillMode=", "CacheDirectory=", "CacheDirectoryMode=", "LimitNOFILE=", "UMask=",
        "NoNewPrivileges=", "PrivateTmp=", "Environment=XDG_CACHE_HOME=",
    )  # fmt: skip
    for key in shared:
        (expected,) = (line for line in by_hand if line.startswith(key))
        assert [line for line in emitted if line.startswith(key)] == [expected], key


def test_who_is_asked_to_end_has_time_to_drain() -> None:
    deployment = dataclasses.replace(DEPLOYMENT, drain_timeout_s=120.5)
    assert "TimeoutStopSec=181\n" in systemd_files(deployment)["pair-0.service"]
    assert "#SBATCH --signal=TERM@181\n" in slurm_files(deployment)["pair.sbatch"]
    for kind in KINDS:
        (text,) = kubernetes_files(deployment, kind).values()
        assert set(re.findall(r"terminationGracePeriodSeconds: (\d+)", text)) == {"186"}


@pytest.mark.parametrize("files", [shell_files, systemd_files])
def test_node_0_must_be_known_where_nobody_finds_it(files: Any) -> None:
    deployment = Deployment(name="pair", num_nodes=2, command=COMMAND)
    with pytest.raises(ConfigError, match="give --coordinator HOST:PORT or --cluster"):
        files(deployment)


@pytest.mark.parametrize("name", ["", "Pair", "1a", "a_b", "a-", "a" * 41, "a b"])
def test_a_name_must_be_a_label(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a deployment"):
        Deployment(name=name, num_nodes=2, command=COMMAND)


def test_the_command_reads_back() -> None:
    assert shlex.split(shlex.join(COMMAND.arguments())) == list(COMMAND.arguments())
    assert COMMAND.arguments()[:2] == ("launch", ODD)
