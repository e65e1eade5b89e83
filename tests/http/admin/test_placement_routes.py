"""The routes of live balancing: an admin key is needed, and a refusal gives the reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from experts.placement.plan_file import placement_text
from experts.placement.problem.placement import Placement, contiguous
from moe_serve.cli.main import main
from moe_serve.config.sections import ServerConfig
from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.routes.cell_placements import AnyPlacement, CellPlacements
from moe_serve.engine.routes.placement_control import (
    OUTCOMES,
    BalanceFigures,
    LastPlan,
    PlacementBrief,
    PlacementStatus,
    RebalanceState,
)
from moe_serve.errors import RebalanceError
from moe_serve.http.app import create_app
from moe_serve.http.generation.served_model import ServedModel

ADMIN = {"Authorization": "Bearer root"}
IDLE = PlacementStatus(
    mode="manual",
    state="idle",
    version=2,
    age_s=12.5,
    num_counted_tokens=3000,
    balance=BalanceFigures(before=0.7, predicted=0.95, achieved=0.9),
    last=LastPlan(outcome="moved", text="5 copies in 2 rounds"),
    num_plans=dict.fromkeys(OUTCOMES, 0) | {"moved": 1},
    num_copies=5,
    num_bytes=5 * 2**20,
    before_p99_s=0.010,
    during_p99_s=0.012,
)


class FakeControl:
    """A control whose plan ends after some calls of `status`."""

    def __init__(self) -> None:
        self.left = 0

    @property
    def state(self) -> RebalanceState:
        return "planning" if self.left else "idle"

    def status(self) -> PlacementStatus:
        self.left = max(0, self.left - 1)
        return replace(IDLE, state="planning") if self.left else IDLE

    def brief(self) -> PlacementBrief:
        return PlacementBrief(
            state=self.state,
            version=IDLE.version,
            age_s=IDLE.age_s,
            last=IDLE.last,
            num_plans=IDLE.num_plans,
        )

    def plan(self) -> Placement:
        return contiguous([1], 4, 2)

    def apply(self, target: Placement) -> PlacementStatus:
        if target.num_ranks != 2:
            raise RebalanceError("The plan does not fit, and nothing was moved: 3 ranks, not 2.")
        self.left = 3
        return self.status()

    def rebalance(self) -> PlacementStatus:
        if self.left:
            raise RebalanceError(
                "A plan or a move is already in progress: wait until it has ended."
            )
        self.left = 3
        return self.status()


MakeClient = Callable[[AnyPlacement | None], TestClient]


@pytest.fixture
def client_of(engine: EngineClient, model: ServedModel) -> MakeClient:
    def make(control: AnyPlacement | None) -> TestClient:
        config = ServerConfig(admin_keys=("root",))
        return TestClient(create_app(engine, model, config, placement=control))

    return make


def test_status_plan_and_rebalance(client_of: MakeClient) -> None:
    with client_of(FakeControl()) as client:
        for method, path in (("GET", ""), ("GET", "/plan"), ("POST", "/rebalance")):
            assert client.request(method, f"/admin/placement{path}").status_code == 401
        found = client.get("/admin/placement", headers=ADMIN).json()
        assert (found["version"], found["balance"]["achieved"]) == (2, 0.9)
        plan = client.get("/admin/placement/plan", headers=ADMIN).json()
        assert plan["layers"] == {"1": [[0], [0], [1], [1]]}
        begun = client.post("/admin/placement/rebalance", headers=ADMIN)
        assert begun.status_code == 200 and begun.json()["state"] == "planning"
        again = client.post("/admin/placement/rebalance", headers=ADMIN)
        assert again.status_code == 409
        assert (
            again.json()["error"]["message"]
            == "A plan or a move is already in progress: wait until it has ended."
        )


def test_a_plan_is_applied(client_of: MakeClient) -> None:
    text = placement_text(contiguous([1], 4, 2))
    with client_of(FakeControl()) as client:
        post = functools.partial(
            client.post,
            "/admin/placement/plan",
            headers={**ADMIN, "Content-Type": "application/json"},
        )
        assert client.post("/admin/placement/plan", content=text).status_code == 401
        begun = post(content=text)
        assert begun.status_code == 200 and begun.json()["state"] == "planning"
        for wrong, words in {
            "[]": "format",
            "{": "Expecting property name",
            "": "Expecting value",
            text.replace('"version": 1', '"version": 7'): "version must be 1, got 7",
            text.replace('"1":', '"1": [], "1":'): "key '1' occurs twice",
            text.replace("[[0],", "[[],"): "1 experts are on no rank",
        }.items():
            answer = post(content=wrong)
            assert answer.status_code == 400 and words in answer.json()["error"]["message"], wrong
        answer = post(content=placement_text(contiguous([1], 4, 3)))
        assert answer.status_code == 409 and "3 ranks, not 2" in answer.json()["error"]["message"]


def test_each_cell_has_a_placement_of_its_own(
    client_of: MakeClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = CellPlacements()
    for number in (2, 0):
        cells.add(number, FakeControl())
    with client_of(cells) as client:
        ask = functools.partial(client.request, headers=ADMIN)
        found = ask("GET", "/admin/placement").json()["cells"]
        assert [(each["cell"], each["version"]) for each in found] == [(0, 2), (2, 2)]
        begun = ask("POST", "/admin/placement/rebalance?cell=2")
        assert begun.status_code == 200 and begun.json()["state"] == "planning"
        assert ask("POST", "/admin/placement/rebalance?cell=2").status_code == 409
        assert ask("GET", "/admin/placement?cell=0").json()["state"] == "idle"
        assert "layers" in ask("GET", "/admin/placement/plan?cell=0").json()
        for path, status, words in (
            ("GET /plan", 400, "name one by ?cell=N; this server has the cells 0, 2."),
            ("POST /plan", 400, "name one by ?cell=N"),
            ("POST /rebalance", 400, "name one by ?cell=N"),
            ("POST /rebalance?cell=1", 409, "There is no cell 1: this server has the cells 0, 2."),
            ("GET ?cell=x", 400, "cell"),
        ):
            method, _, rest = path.partition(" ")
            answer = ask(method, f"/admin/placement{rest}")
            assert answer.status_code == status, f"{path}: {answer.text}"
            assert words in answer.json()["error"]["message"], path
        parts = client.get("/dashboard/state").json()["cell_placements"]
        assert [(each["cell"], each["version"]) for each in parts] == [("cell-0", 2), ("cell-2", 2)]
        assert 'placement_copies_total{model_name="tiny"} 10.0' in client.get("/metrics").text
    with client_of(FakeControl()) as client:
        answer = client.get("/admin/placement?cell=0", headers=ADMIN)
        assert answer.status_code == 409 and "single cell" in answer.json()["error"]["message"]

    def opened(**named: object) -> TestClient:
        client = client_of(cells)
        client.headers = named["headers"]  # type: ignore[assignment]
        return client

    monkeypatch.setattr("httpx.Client", opened)
    assert run("status", "--admin-key", "root") == 0
    shown = capsys.readouterr().out
    assert "cell-0" in shown and "cell-2" in shown
    assert run("rebalance", "--cell", "2", "--admin-key", "root") == 0
    assert run("rebalance", "--admin-key", "root") == 2
    assert "name one by ?cell=N" in capsys.readouterr().err


def test_a_server_without_ranks_says_so(client_of: MakeClient) -> None:
    with client_of(None) as client:
        answer = client.post("/admin/placement/rebalance", headers=ADMIN)
        assert answer.status_code == 409 and "no expert ranks" in answer.json()["error"]["message"]
        assert "placement_version" not in client.get("/metrics").text


def test_metrics(client_of: MakeClient) -> None:
    with client_of(FakeControl()) as client:
        text = client.get("/metrics").text
    for line in (
        'placement_version{model_name="tiny"} 2.0',
        'placement_age_seconds{model_name="tiny"} 12.5',
        'placement_moving{model_name="tiny"} 0.0',
        'placement_copies_total{model_name="tiny"} 5.0',
        'placement_copied_bytes_total{model_name="tiny"} 5.24288e+06',
        'placement_plans_total{model_name="tiny",outcome="moved"} 1.0',
        'placement_plans_total{model_name="tiny",outcome="gain"} 0.0',
        'placement_balancedness{kind="predicted",model_name="tiny"} 0.95',
        'placement_step_p99_seconds{model_name="tiny",when="during"} 0.012',
    ):
        assert f"moe_serve:{line}" in text, line


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["placement", *arguments])
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


def test_the_command(
    client_of: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: object,
) -> None:
    control = FakeControl()

    def opened(**named: object) -> TestClient:
        client = client_of(control)
        client.headers = named["headers"]  # type: ignore[assignment]
        return client

    monkeypatch.setattr("httpx.Client", opened)
    assert run("rebalance", "--admin-key", "root") == 0
    shown = capsys.readouterr().out
    assert "moved: 5 copies in 2 rounds" in shown and "predicted 0.950" in shown
    assert "10.0 ms, 12.0 ms during the move" in shown
    assert run("save", f"{tmp_path}/plan.json", "--admin-key", "root") == 0
    assert run("apply", f"{tmp_path}/plan.json", "--admin-key", "root") == 0
    assert "moved: 5 copies in 2 rounds" in capsys.readouterr().out
    assert run("apply", f"{tmp_path}/other.json", "--admin-key", "root") == 2
    assert "other.json cannot be read: No such file" in capsys.readouterr().err
    (Path(str(tmp_path)) / "three.json").write_text(placement_text(contiguous([1], 4, 3)))
    assert run("apply", f"{tmp_path}/three.json", "--admin-key", "root") == 2
    assert "the server refused (409): The plan does not fit" in capsys.readouterr().err
    assert run("status", "--admin-key", "wrong") == 2
    assert "valid admin key" in capsys.readouterr().err
    assert run("save", f"{tmp_path}/no/plan.json", "--admin-key", "root") == 2
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--url", "http://127.0.0.1:9") == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
