"""The routes of cells: who may use them, what they list, and what a refusal says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from moe_serve.config.sections import ServerConfig
from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.request.stats import CellStatus, EngineLoad, EngineStats
from moe_serve.errors import CellsError
from moe_serve.http.app import create_app
from moe_serve.http.generation.served_model import ServedModel

ADMIN = {"Authorization": "Bearer root"}


class FakeCells:
    """Two cells, of which one must take requests."""

    def __init__(self) -> None:
        self.draining: set[int] = set()

    def drain(self, index: int, *, is_draining: bool) -> None:
        if is_draining and self.draining - {index}:
            raise CellsError("Cell 1 is not drained: it is the only one that takes requests.")
        (self.draining.add if is_draining else self.draining.discard)(index)

    def stats(self) -> EngineStats:
        cells = [
            CellStatus(
                name=f"cell-{index}",
                role="both",
                ranks="1A1E",
                load=EngineLoad(num_running=index, num_pages=4, num_free_pages=3),
                num_steps=5,
                num_lost_ranks=0,
                outage_s=0.0,
                is_draining=index in self.draining,
            )
            for index in range(2)
        ]
        return EngineStats(cells=tuple(cells))


def test_an_operator_lists_drains_and_undrains_cells(
    engine: EngineClient, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, stats = FakeCells(), engine.stats
    monkeypatch.setattr(engine, "stats", lambda: replace(stats(), cells=cells.stats().cells))
    app = create_app(engine, model, ServerConfig(admin_keys=("root",)), cells=cells)
    with TestClient(app) as client:
        assert client.get("/admin/cells").status_code == 401
        first, second = client.get("/admin/cells", headers=ADMIN).json()["cells"]
        assert (first["name"], second["running"], second["kv_used"]) == ("cell-0", 1, 0.25)
        answer = client.post("/admin/cells/0/drain", headers=ADMIN).json()
        assert [cell["is_draining"] for cell in answer["cells"]] == [True, False]
        refused = client.post("/admin/cells/1/drain", headers=ADMIN)
        assert refused.status_code == 409
        assert "the only one that takes requests" in refused.json()["error"]["message"]
        unknown = client.post("/admin/cells/first/drain", headers=ADMIN)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "route_not_found")
        answer = client.post("/admin/cells/0/undrain", headers=ADMIN).json()
        assert not any(cell["is_draining"] for cell in answer["cells"])
        state = client.get("/dashboard/state").json()
        assert [cell["name"] for cell in state["cells"]] == ["cell-0", "cell-1"]


def test_a_server_with_one_cell_says_so(engine: EngineClient, model: ServedModel) -> None:
    with TestClient(create_app(engine, model, ServerConfig(admin_keys=("root",)))) as client:
        answer = client.get("/admin/cells", headers=ADMIN)
        assert answer.status_code == 409
        assert "start it with --cells" in answer.json()["error"]["message"]
