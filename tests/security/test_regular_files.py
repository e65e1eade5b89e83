"""Only regular files are read: a FIFO would wait for a writer, and a device may never end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from experts.placement.formats.engine_plan import PlanFacts
from experts.placement.placement_error import PlacementError
from experts.placement.plan_file import read_placement
from experts.placement.problem.workloads import read_workloads
from moe_serve import LLM
from moe_serve.bench.report import report
from moe_serve.bench.workload import prompt_maker, trace_rows
from moe_serve.cache.page_key import model_identity
from moe_serve.cli.place import place_inputs
from moe_serve.cli.place.place_inputs import read_cluster
from moe_serve.cli.trace import trace_record
from moe_serve.cluster.control.secret import read_secret
from moe_serve.cluster.launch.cluster_file import read_cluster_file
from moe_serve.cluster.launch.hosts import read_hostfile
from moe_serve.cluster.members.preflight import file_marks
from moe_serve.config.sources import load_config, read_secret_file
from moe_serve.errors import CheckpointError, MoeServeError
from moe_serve.http.wire.uvicorn_server import Tls
from moe_serve.learn.documents import read_documents
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.pipeline.timeline.timeline_reader import read_timeline
from moe_serve.planning.calibration_file import read_calibration
from moe_serve.text.chat_template import ChatTemplate
from routing_predictor.importers.importer import import_files
from routing_predictor.importers.tables import ImportOptions
from routing_predictor.traces.card import read_card
from routing_predictor.traces.routing_error import RoutingError

CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "stray.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
READERS: dict[str, Callable[[Path], Any]] = {
    "calibration.json": read_calibration,
    "card.json": read_card,
    "certificate.pem": lambda path: Tls(str(path), None, None),
    "cluster.yaml": read_cluster_file,
    "config.yaml": lambda path: load_config(flags={}, environ={}, file=path),
    "devices.yaml": read_cluster,
    "hostfile": read_hostfile,
    "keys": lambda path: read_secret_file(str(path)),
    "load.csv": lambda path: read_workloads([path], 1, None),
    "load.safetensors": lambda path: read_workloads([path], 1, None),
    "placement.json": read_placement,
    "plan.json": lambda path: place_inputs.read_plan(path, PlanFacts(num_devices=2, num_experts=4)),
    "prompts.jsonl": prompt_maker.read_prompts,
    "prompts.txt": trace_record.read_prompts,
    "report.json": report.read_report,
    "rows.csv": trace_rows.read_trace,
    "rows.jsonl.gz": trace_rows.read_trace,
    "secret": lambda path: read_secret({"MOE_SERVE_CLUSTER_SECRET": f"@{path}"}),
    "table.npz": lambda path: import_files([path], "auto", ImportOptions()),
    "table.pt": lambda path: import_files([path], "auto", ImportOptions()),
    "texts.txt": lambda path: read_documents([path.parent], "train"),
    "timeline.json": read_timeline,
}


def put(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to(path.parent / "nothing")
    else:
        here = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path.name)
        finally:
            os.chdir(here)


@pytest.fixture(autouse=True)
def never_hangs() -> Iterator[None]:
    """Turns a hang in open() into a failure of this test alone."""

    def give_up(*_: object) -> None:
        raise AssertionError("it waits for a file that is not a regular one")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_folder(), tmp_path / "model"))


@pytest.mark.parametrize("kind", ["FIFO", "device", "link"])
@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_checkpoint_has_regular_files(folder: Path, name: str, kind: str) -> None:
    put(kind, folder / name)
    with pytest.raises(CheckpointError) as caught:
        LLM(str(folder))
    reason = "a link to nothing" if kind == "link" else f"a {kind}, not a regular file"
    assert str(caught.value) in (
        f"{folder / name} cannot be read: it is {reason}.",
        f"{folder / name} is missing ({reason}): fetch it again.",
    )


@pytest.mark.parametrize("kind", ["FIFO", "device", "link"])
def test_what_tells_checkpoints_apart(folder: Path, kind: str) -> None:
    put(kind, folder / "stray.safetensors")
    for read in (model_identity, file_marks):
        with pytest.raises(CheckpointError, match=r"stray\.safetensors.*it is a"):
            read(folder)
    put(kind, folder / "chat_template.jinja")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read: it is a"):
        ChatTemplate.load(folder)


@pytest.mark.parametrize("kind", ["FIFO", "device", "socket", "link"])
@pytest.mark.parametrize("name", READERS)
def test_other_files(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    put(kind, path)
    with pytest.raises((MoeServeError, RoutingError, PlacementError)) as caught:
        READERS[name](path)
    assert "\n" not in str(caught.value) and "Errno" not in str(caught.value)
    assert str(path) in str(caught.value)
