"""deploy/: files that no test here can run are read and compared with the program that they
start."""

from __future__ import annotations

import configparser
import contextlib
import http.server
import importlib.util
import re
import shlex
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import lock
from moe_serve import __version__
from moe_serve.cli.main import app
from moe_serve.config.keys import config_keys
from moe_serve.config.sources import LoadedConfig, load_config, variable_name
from moe_serve.http.gate.auth import OPEN_PATHS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "operate" / "deploy.md"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
UNIT = DEPLOY / "systemd" / "moe-serve.service"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
PODS = [DEPLOY / "kubernetes" / "cpu.yaml", DEPLOY / "kubernetes" / "gpu.yaml"]
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc")
Manifest = dict[str, Any]


def manifests(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def compose() -> Manifest:
    return manifests(COMPOSE)[0]


def pod(path: Path) -> Manifest:
    (deployment,) = manifests(path)
    spec: Manifest = deployment["spec"]["template"]["spec"]
    return spec


def unit() -> configparser.RawConfigParser:
    """Returns the systemd unit; a key that is given several times has its last value."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(UNIT.read_text("utf-8"))
    return parser


def loaded(environ: dict[str, str], keys: Path) -> LoadedConfig:
    """Returns the configuration that these variables give, with `keys` in place of each file of
    keys."""
    keys.write_text("secret\n")
    return load_config(
        flags={}, environ={n: re.sub(r"@[^,]+", f"@{keys}", v) for n, v in environ.items()}
    )


def health_check() -> Any:
    """Loads the script of the images, which belongs to no package."""
    path = DEPLOY / "docker" / "healthcheck.py"
    spec = importlib.util.spec_from_file_location("healthcheck", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def images() -> Iterator[tuple[Path, str]]:
    for path in FILES:
        text = path.read_text("utf-8")
        if path in DOCKERFILES:
            yield from ((path, image) for image in re.findall(r"^FROM (\S+)", text, re.MULTILINE))
        elif path.suffix in (".yaml", ".yml"):
            yield from ((path, image) for image in re.findall(r"\bimage: (\S+)", text))


def commands() -> Iterator[tuple[Path, list[str]]]:
    """Returns (file, words) of each `moe-serve COMMAND ...` in the files and on the page."""
    known = typer.main.get_group(app).commands
    for path in (*FILES, PAGE):
        text = re.sub(r"\\\n[#\s]*", " ", path.read_text("utf-8"))
        for match in re.finditer(r"(?:^|[\s`/=])moe-serve ((?:[a-z]+)(?: [^\n`|()#]*)?)", text):
            words = shlex.split(match[1].replace("'", ""))
            if words[0] in known:
                yield path, words


def test_yaml_is_read() -> None:
    paths = [path for path in FILES if path.suffix in (".yaml", ".yml")]
    assert len(paths) >= 9
    for path in paths:
        assert all(isinstance(manifest, dict) for manifest in manifests(path)), path


def test_images_are_pinned_and_our_own_are_of_this_version() -> None:
    found = list(images())
    assert len(found) >= 10
    for path, image in found:
        _, _, tag = image.rpartition(":")
        assert re.match(r"v?\d+\.\d+", tag), f"{image} in {path} is not pinned"
        if image.startswith("moe-serve:"):
            version, _, kind = tag.partition("-")
            assert version == __version__, f"{image} in {path}: this is {__version__}"
            assert (DEPLOY / "docker" / f"Dockerfile.{kind}").is_file()
    assert "latest" not in " ".join(image for _, image in found)


def test_variables_are_settings() -> None:
    known = {variable_name(key) for key in config_keys()}
    found = {
        (path.name, name)
        for path in (*FILES, PAGE)
        for name in re.findall(r"MOE_SERVE_[A-Z_]+[A-Z]", path.read_text("utf-8"))
    }
    assert len(found) > 15
    # The name of a Service makes the third, which is why enableServiceLinks is off.
    known |= {"MOE_SERVE_CLUSTER_SECRET", "MOE_SERVE_ADMIN_KEY", "MOE_SERVE_PORT"}
    assert sorted((path, name) for path, name in found if name not in known) == []


def test_commands_have_these_flags() -> None:
    group = typer.main.get_group(app)
    found = list(commands())
    assert {words[0] for _, words in found} >= {"serve", "launch", "placement"}
    for path, (name, *words) in found:
        command: Any = group.commands[name]
        if hasattr(command, "commands") and words:
            assert words[0] in command.commands, f"{path}: moe-serve {name} {words[0]}"
            command = command.commands[words[0]]
        flags = {flag for parameter in command.params for flag in parameter.opts}
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= flags | {"--help"}, f"{path}: moe-serve {name} has no {used - flags}"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix)
def test_images_are_made_as_they_should(path: Path) -> None:
    text = path.read_text("utf-8")
    build, final = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    assert re.findall(r"^USER (.*)", final, re.MULTILINE) == ["10001:10001"]
    assert "STOPSIGNAL SIGTERM" in final
    (torch,) = re.findall(r'"(torch[^"]*)"', (ROOT / "pyproject.toml").read_text("utf-8"))[:1]
    assert f'ARG TORCH="{torch}"' in build
    assert 'ARG TORCH_INDEX_URL=""' in build, "without it, pip decides"
    steps = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert "://" not in steps, "no host stands in a step"
    (check,) = re.findall(r'CMD \["python", "/opt/moe-serve/(\S+)"\]', final)
    assert f"COPY deploy/docker/{check} /opt/moe-serve/{check}" in final
    assert (path.parent / check).is_file()


def pins() -> dict[str, Version]:
    """Returns the versions in deploy/requirements.lock. Each line is one name and version, without
    a host."""
    lines = (DEPLOY / "requirements.lock").read_text("utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    found = {}
    for line in pinned:
        match = re.fullmatch(r"([a-z0-9]+(?:-[a-z0-9]+)*)==([0-9][a-z0-9.]*)", line)
        assert match is not None, f"{line!r} is not name==version"
        assert match[1] not in found, f"{match[1]} is there twice"
        found[match[1]] = Version(match[2])
    assert list(found) == sorted(found), "scripts/lock.py writes them in order"
    return found


def test_every_dependency_is_locked_within_its_range() -> None:
    locked, project = pins(), (ROOT / "pyproject.toml").read_text("utf-8")
    pattern = r"^(dependencies|gpu|events|otel|encryption) = \[(.*?)\]$"
    parts = re.findall(pattern, project, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in parts] == ["dependencies", "gpu", "events", "otel", "encryption"]
    for requirement in map(
        Requirement, re.findall(r'"([^"]+)"', "".join(text for _, text in parts))
    ):
        name = canonicalize_name(requirement.name)
        assert name in locked, f"{name} is missing: python scripts/lock.py --write"
        assert locked[name] in requirement.specifier, f"{name} is {locked[name]}, not {requirement}"


def test_the_lock_has_what_the_dependencies_need() -> None:
    installed = {
        name: Version(Version(one.version).public)
        for name, one in lock.closure("moe-serve", lock.EXTRAS).items()
    }
    locked = pins()
    if any(locked.get(name, version) != version for name, version in installed.items()):
        pytest.skip("other versions are installed here than those that are locked")
    assert installed.keys() <= locked.keys(), "python scripts/lock.py --write"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix)
def test_images_have_the_locked_versions(path: Path) -> None:
    steps = path.read_text("utf-8").replace("\\\n", " ")
    installs = re.findall(r"^RUN .*pip install .*", steps, re.MULTILINE)
    assert len(installs) == 2
    assert all("--constraint deploy/requirements.lock" in step for step in installs)
    assert steps.index("COPY deploy/requirements.lock") < steps.index(installs[0])


def test_what_images_need_is_let_into_the_context() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "nothing but what is named"
    allowed = [line.removeprefix("!") for line in rules if line.startswith("!")]
    for path in allowed:
        assert (ROOT / path).exists(), path
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    packages = re.search(r"^packages = \[(.*)\]", project, re.MULTILINE)
    assert packages
    needed = {name.split("/")[0] for name in re.findall(r'"([^"]+)"', packages[1])}
    assert needed | {"pyproject.toml", "README.md", "LICENSE"} <= set(allowed)


def test_the_paths_of_compose() -> None:
    services = compose()["services"]
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).exists(), f"{name}: {source}"
            elif not source.startswith("${"):
                assert source in compose()["volumes"], f"{name}: {source}"
        assert set(service.get("secrets", ())) <= set(compose()["secrets"]), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
    for overlay in (compose(), manifests(COMPOSE.with_name("compose.cuda.yaml"))[0]):
        assert (ROOT / overlay["services"]["moe-serve"]["build"]["dockerfile"]).is_file()
    assert (COMPOSE.parent / services["moe-serve"]["build"]["context"]).resolve() == ROOT
    ignored = (COMPOSE.parent / ".gitignore").read_text("utf-8").split()
    assert "secrets/" in ignored
    assert all(item["file"].startswith("./secrets/") for item in compose()["secrets"].values())


def test_the_settings_of_compose(tmp_path: Path) -> None:
    service = compose()["services"]["moe-serve"]
    environ = {**service["environment"], "MOE_SERVE_MODEL_PATH": ""}
    server = loaded(environ, tmp_path / "keys").config.server
    assert (server.host, server.api_keys, server.admin_keys) == (
        "0.0.0.0", ("secret", "secret"), ("secret",)
    )  # fmt: skip
    used = re.findall(r"@/run/secrets/([\w-]+)", " ".join(map(str, environ.values())))
    assert sorted(used) == sorted(service["secrets"])
    assert service["stop_grace_period"] == "45s" and server.drain_timeout_s <= 40


def test_prometheus_and_grafana_find_each_other() -> None:
    services = compose()["services"]
    (config,) = manifests(DEPLOY / "prometheus" / "prometheus.yml")
    server, ready = config["scrape_configs"]
    assert server["static_configs"] == [{"targets": ["moe-serve:8000"]}]
    key = server["authorization"]["credentials_file"].removeprefix("/run/secrets/")
    assert key in services["prometheus"]["secrets"] and key in services["moe-serve"]["secrets"]
    (target,) = ready["static_configs"][0]["targets"]
    assert target.removeprefix("http://moe-serve:8000") in OPEN_PATHS
    assert ready["relabel_configs"][-1]["replacement"].split(":")[0] in services
    mounted = [volume.split(":")[1] for volume in services["prometheus"]["volumes"]]
    assert set(config["rule_files"]) <= set(mounted)
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    rules = (DEPLOY / "prometheus" / "rules.yml").read_text("utf-8")
    assert set(re.findall(r'job="([^"]+)"', rules)) == jobs
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = manifests(provisioning / "datasources" / "prometheus.yaml")[0]["datasources"]
    assert source["url"].removeprefix("http://").split(":")[0] in services
    (provider,) = manifests(provisioning / "dashboards" / "moe-serve.yaml")[0]["providers"]
    folder = provider["options"]["path"]
    assert any(f":{folder}/" in volume for volume in services["grafana"]["volumes"])


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_the_pods(path: Path, tmp_path: Path) -> None:
    spec = pod(path)
    (container,) = spec["containers"]
    plain = {item["name"]: item.get("value", "4") for item in container["env"]}
    config = loaded(plain, tmp_path / "keys").config
    assert config.server.host == "0.0.0.0" and config.server.api_keys and config.server.admin_keys
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] >= pause + config.server.drain_timeout_s + 5
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS
    # Live is 200 while the model loads, so only ready gives up on a load that does not end.
    assert container["startupProbe"]["httpGet"]["path"] == "/health/ready"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
    assert plain["MOE_SERVE_SERVER_API_KEYS"].startswith(f"@{mounts['keys']}/")


def test_the_service_and_the_budget_choose_the_pods() -> None:
    service, budget = manifests(DEPLOY / "kubernetes" / "service.yaml")
    for path in PODS:
        (deployment,) = manifests(path)
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"] == labels
        assert service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"] == labels
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        (port,) = container["ports"]
        assert service["spec"]["ports"][0]["targetPort"] == port["name"]


def test_the_unit(tmp_path: Path) -> None:
    service = unit()["Service"]
    assert set(unit().sections()) == {"Unit", "Service", "Install"}
    lines = [line for line in UNIT.read_text("utf-8").splitlines() if line.startswith("Environ")]
    words = [word for line in lines for word in line.partition("=")[2].split()]
    environ = dict(word.split("=", 1) for word in words)
    ours = {name: value for name, value in environ.items() if name.startswith("MOE_SERVE_")}
    config = loaded(ours, tmp_path / "keys").config
    assert config.server.api_keys and config.server.admin_keys
    text = UNIT.read_text("utf-8")
    handed = set(re.findall(r"^LoadCredential=([\w-]+):", text, re.MULTILINE))
    assert {value.removeprefix("@%d/") for value in ours.values()} == handed
    assert int(service["TimeoutStopSec"]) > config.server.drain_timeout_s
    assert service["NoNewPrivileges"] == service["DynamicUser"] == "yes"


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, str]:
    """Returns the variables of a server that has a certificate for a name of its own."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes it")
    cert, key = str(tmp_path / "server.crt"), str(tmp_path / "server.key")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += f" -subj /CN=server.example -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return {"MOE_SERVE_SERVER_SSL_CERTFILE": cert, "MOE_SERVE_SERVER_SSL_KEYFILE": key}


@contextlib.contextmanager
def answering(status: int, context: ssl.SSLContext | None) -> Iterator[dict[str, str]]:
    """Returns the port variable of a server that answers once, in plain HTTP if there is no
    context."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/health/live"
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield {"MOE_SERVE_SERVER_PORT": str(server.server_port)}
        thread.join(5)


@pytest.mark.parametrize("status", [200, 503])
def test_health_check(status: int) -> None:
    is_live = health_check().is_live
    with answering(status, None) as environ:
        assert is_live(environ) is (status == 200)
    assert not is_live(environ), "nobody listens there any more"


@pytest.mark.parametrize("status", [200, 503])
def test_health_check_over_https(status: int, certificate: dict[str, str]) -> None:
    assert {variable_name(key) for key in config_keys()} >= certificate.keys()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate.values())
    with answering(status, context) as environ:
        assert health_check().is_live({**environ, **certificate}) is (status == 200)


def test_health_check_of_a_server_that_asks_for_certificates(certificate: dict[str, str]) -> None:
    """The check has no certificate to show, so the server's half of the handshake counts as
    healthy."""
    cert = certificate["MOE_SERVE_SERVER_SSL_CERTFILE"]
    environ = {**certificate, "MOE_SERVE_SERVER_SSL_CA_CERTS": cert}
    assert {variable_name(key) for key in config_keys()} >= environ.keys()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate.values())
    context.load_verify_locations(cert)
    context.verify_mode = ssl.CERT_REQUIRED
    with answering(200, context) as port:
        assert health_check().is_live({**port, **environ})
    assert not health_check().is_live({**port, **environ}), "nobody listens there any more"


def test_the_batch_script_is_what_launch_writes(tmp_path: Path) -> None:
    written = DEPLOY / "slurm" / "moe-serve.sbatch"
    page = (DEPLOY / "slurm" / "README.md").read_text("utf-8")
    (line,) = re.findall(r"^ +moe-serve (launch .*) --out deploy/slurm$", page, re.M)
    app([*shlex.split(line), "--out", str(tmp_path)], standalone_mode=False)
    assert (tmp_path / written.name).read_text("utf-8") == written.read_text("utf-8")
    subprocess.run(["bash", "-n", str(written)], check=True)
