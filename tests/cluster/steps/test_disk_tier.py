"""Ranks with a disk: the same answers, also after restarts, and pages that come from the disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from moe_serve.cache.tiers.disk_report import IdentityReport, report
from moe_serve.cache.tiers.segment import Segment
from moe_serve.cache.tiers.store import TierStats
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import CacheConfig, EngineConfig
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.errors import ConfigError
from tests.support.cluster.fault_drive import FaultDrive, fault_config, undisturbed
from tests.support.cluster.layouts import Answer, colocated, config, requests, serve
from tests.support.cluster.thread_starter import ThreadStarter

VOCAB_SIZE = 4096  # of the demonstration model
PLAIN = CacheConfig(num_pages=256)
WANTED = requests(9, VOCAB_SIZE)
PAGE_SIZE = 16


def with_disk(of: EngineConfig, folder: Path, **cache: object) -> EngineConfig:
    sizes = {"disk_bytes": 64 * 2**20, "disk_min_free_bytes": 0, "checkpoint_after_s": 0.0} | cache
    return replace(of, cache=replace(PLAIN, disk_path=str(folder), **sizes))  # type: ignore[arg-type]


def tier_of(engine: DrivenEngine) -> TierStats:
    tier = engine.stats().tier
    assert tier is not None and tier.memory is not None
    return tier


def open_tier(engine: DrivenEngine) -> None:
    """Waits until the weights' digest is known."""
    deadline = time.monotonic() + 60
    while not (tier := tier_of(engine)).is_reading:
        assert time.monotonic() < deadline and not tier.state.startswith("writing"), tier.state
        time.sleep(0.005)


def life(
    of: EngineConfig, wanted: list[GenerationRequest] = WANTED
) -> tuple[dict[str, Answer], TierStats]:
    """Returns the answers of ranks that are started and ended, and the figures of their tier."""
    engine = build_cluster(of, make_starter=ThreadStarter).engine
    try:
        open_tier(engine)
        answers = serve(engine, wanted)
        return answers, tier_of(engine)
    finally:
        engine.close()


def stored(folder: Path) -> list[IdentityReport]:
    return report(folder, now=time.time(), verifies=True)


@dataclass(frozen=True, slots=True)
class Filled:
    """A folder with the pages of one life, what it answered, and the figures of its tier."""

    folder: Path
    answers: dict[str, Answer]
    tier: TierStats

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.folder, to))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    folder = tmp_path_factory.mktemp("filled") / "kv"
    return Filled(folder, *life(with_disk(config(1, 1), folder)))


@pytest.mark.parametrize(("attention", "shards"), [(1, 1), (2, 1), (1, 2)])
def test_warm_from_disk_is_cold(attention: int, shards: int, tmp_path: Path) -> None:
    of = with_disk(config(attention, 1, attention_tp=shards), tmp_path / "kv")
    expected = colocated(replace(of, cache=PLAIN), WANTED)
    cold, tier = life(of)
    assert cold == expected and tier.hit_tokens == 0
    (only,) = stored(tmp_path / "kv")
    computed = [len(r.prompt_token_ids) + len(expected[r.request_id].token_ids) - 1 for r in WANTED]
    num_pages = sum(count // PAGE_SIZE for count in computed)
    assert (only.num_pages, only.num_wrong) == (num_pages, 0), "every full page is stored"
    warm, tier = life(of)
    assert warm == expected
    assert tier.loads["hit"] > 0 and tier.hit_tokens > 0
    assert tier.memory is not None and tier.memory.num_pages >= tier.loads["hit"]
    (again,) = stored(tmp_path / "kv")
    assert (again.num_pages, again.num_wrong) == (only.num_pages, 0), "nothing is stored twice"


def test_a_killed_rank_and_a_restart(tmp_path: Path) -> None:
    of = with_disk(fault_config(2, 1), tmp_path / "kv")
    wanted = requests(8, VOCAB_SIZE, num_tokens=24)
    expected = undisturbed(replace(of, cache=PLAIN), wanted)
    with FaultDrive(of) as drive:
        open_tier(drive.engine)
        pid = drive.pid("attention-1")
        kill = lambda: os.kill(pid, signal.SIGKILL)  # noqa: E731
        assert drive.serve(wanted, kill, after_steps=18) == expected, "a token changed"
        drive.wait_until_complete()
    (only,) = stored(tmp_path / "kv")
    assert only.num_pages > 0 and only.num_wrong == 0, "nothing torn is on the disk"
    answers, tier = life(of, wanted)
    assert answers == expected and tier.loads["hit"] > 0


def test_damaged_pages_are_computed(filled: Filled, tmp_path: Path) -> None:
    of = with_disk(config(1, 1), filled.copy(tmp_path / "kv"))
    (file,) = (tmp_path / "kv").glob("*/*.kv")
    with file.open("r+b") as stream:  # in every slot some bytes of the payload
        for offset in range(2 * 4096 + 100, file.stat().st_size, 4096):
            stream.seek(offset)
            stream.write(b"wrong")
    answers, tier = life(of)
    assert answers == filled.answers
    assert tier.loads["corrupt"] > 0 and tier.loads.get("hit", 0) == 0


def test_a_disk_that_fails_is_no_error(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "it fails")

    of = with_disk(config(1, 1), filled.copy(tmp_path / "kv"))
    monkeypatch.setattr(Segment, "read", fail)
    answers, tier = life(of)
    assert answers == filled.answers
    assert tier.loads["failed"] > 0 and tier.loads.get("hit", 0) == 0
    monkeypatch.setattr(Segment, "write", fail)
    answers, tier = life(with_disk(config(1, 1), tmp_path / "other"))
    assert answers == filled.answers
    assert not tier.saves.get("saved") and not stored(tmp_path / "other")[0].num_pages


def test_ranks_with_another_number_of_shards_find_the_pages(filled: Filled, tmp_path: Path) -> None:
    folder = filled.copy(tmp_path / "kv")
    answers, tier = life(with_disk(config(1, 1, attention_tp=2), folder))
    assert answers == filled.answers and tier.hit_tokens > 0
    assert len(stored(folder)) == 1


@pytest.mark.parametrize("slots", [4, 9])
def test_an_arena_of_few_slots_serves(slots: int, filled: Filled, tmp_path: Path) -> None:
    """Longer runs than the arena has slots are read in part, and the rest is computed."""
    memory = filled.tier.memory
    assert memory is not None
    page_bytes = memory.num_bytes // memory.num_pages
    folder = filled.copy(tmp_path / "kv")
    answers, tier = life(with_disk(config(2, 1), folder, memory_tier_bytes=slots * page_bytes))
    assert answers == filled.answers
    assert tier.loads["hit"] > 0 and tier.hit_tokens > 0


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    of = with_disk(config(1, 1), tmp_path / "kv")
    engine = build_cluster(of, make_starter=ThreadStarter).engine
    try:
        with pytest.raises(ConfigError, match="is in use by another process"):
            build_cluster(of, make_starter=ThreadStarter)
    finally:
        engine.close()
    small = with_disk(config(1, 1), tmp_path / "kv", disk_bytes=1000)
    with pytest.raises(ConfigError, match=r"cache\.disk_bytes"):
        build_cluster(small, make_starter=ThreadStarter)
    life(of, WANTED[:1])  # the refused ones have let go of the folder
