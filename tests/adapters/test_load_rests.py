"""Loads rest beside steps, and not at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_serve.adapters import load_rests
from moe_serve.adapters.adapter_build import AdapterBuilder
from moe_serve.adapters.adapter_files import open_unchanged
from moe_serve.adapters.load_rests import LoadRests
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.model.load.loader import ModelLoader
from tests.support.adapters.adapter_folders import EXPERTS, write_lora


class FakeTime:
    """A thread whose calls take 0.15 ms each; sleeping takes no processor time."""

    def __init__(self) -> None:
        self.now, self.rests = 5.0, list[float]()

    def thread_time(self) -> float:
        self.now += 0.00015
        return self.now

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(load_rests, "time", time)
    return time


def test_a_rest_follows_enough_work(fake: FakeTime) -> None:
    rests = LoadRests()
    rests.start_load()
    rests()
    assert fake.rests == []  # at the start, nothing runs beside it
    rests.begin()
    rests.start_load()
    for _ in range(4):
        rests()
    assert fake.rests == pytest.approx([0.0012, 0.0012])  # after 0.3 ms each
    fake.now += 10.0
    rests()
    assert fake.rests[2] == 0.002


def test_an_adapter_is_loaded_in_pieces(base: Path, tmp_path: Path, fake: FakeTime) -> None:
    adapter = write_lora(tmp_path / "lora", base, pattern=EXPERTS)
    loader = ModelLoader(base)
    builder = AdapterBuilder(loader, AdapterConfig())
    builder.rests.begin()
    with open_unchanged(adapter) as files:
        builder.build(files)
    num_experts = sum(layer.is_sparse for layer in loader.spec.layers) * (
        loader.spec.router.num_experts
    )
    assert len(fake.rests) >= num_experts  # while matrices are read and packed
