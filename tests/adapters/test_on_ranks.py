"""Adapters on ranks: the answers of one process, bit for bit, in any layout, with messages of the
size that they have without adapters, and after ranks are lost."""

from __future__ import annotations

import gc
import itertools
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_serve.adapters.bitdelta.make import make_bitdelta
from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.cluster.control.rank_name import all_ranks
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.errors import CheckpointError, ConfigError, InvalidRequestError
from moe_serve.pipeline.exchange.native_lanes import NativeLanes
from moe_serve.pipeline.links.data_group import DataGroup
from moe_serve.pipeline.links.transfer import Transfer
from tests.support.adapters.adapter_folders import (
    EXPERTS,
    tensors_of,
    write_esft,
    write_lora,
    write_merged,
)
from tests.support.adapters.bitdelta_folders import write_fine_tune
from tests.support.cluster.fault_drive import FaultDrive
from tests.support.cluster.layouts import Answer, config, requests, serve
from tests.support.cluster.live_moves import Moves
from tests.support.cluster.thread_starter import ThreadStarter
from tests.support.families.all_cases import CASES
from tests.support.families.parity import write_checkpoint

VOCAB_SIZE = 300
NAMES = (None, "esft", "lora", "experts", "bits")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterConfig:
    root = tmp_path_factory.mktemp("ranks")
    tuned = write_fine_tune(root / "tuned", base, has_routers=False)
    make_bitdelta(base, tuned, root / "bits")
    folders = {
        "bits": root / "bits",
        "esft": write_esft(root / "esft", base, {0: [0, 1, 3], 1: [2], 2: [0, 2]}),
        "lora": write_lora(root / "lora", base),
        "experts": write_lora(root / "experts", base, seed=3, pattern=EXPERTS),
    }
    modules = tuple(f"{name}={folder}" for name, folder in folders.items())
    return AdapterConfig(is_enabled=True, modules=modules, root=str(root))


def of(
    base: Path,
    adapters: AdapterConfig,
    ranks: tuple[int, int],
    router: str = "auto",
    shards: int = 1,
) -> EngineConfig:
    made = config(*ranks, folder=base, dtype="bfloat16", router=router, attention_tp=shards)
    return replace(made, adapters=adapters)


def mixed(
    registry: AdapterRegistry | None, count: int = 8, names: Sequence[str | None] = NAMES
) -> list[GenerationRequest]:
    """Requests of the base model and of each adapter in turns."""
    assert registry is not None
    held = [None if name is None else registry.acquire(name) for name in names]
    wanted = requests(count, VOCAB_SIZE, num_tokens=4)
    return [replace(each, adapter=held[i % len(held)]) for i, each in enumerate(wanted)]


def answers(built: BuiltEngine, count: int = 8) -> dict[str, Answer]:
    return serve(built.engine, mixed(built.adapters, count))


@pytest.fixture(scope="module")
def expected(base: Path, adapters: AdapterConfig) -> dict[str, Answer]:
    alone = build_engine(of(base, adapters, (0, 0)))
    return answers(alone)


@pytest.mark.parametrize(
    ("ranks", "router", "shards"),
    [
        ((1, 1), "attention", 1),
        ((2, 3), "attention", 1),
        ((1, 2), "experts", 1),
        ((2, 1), "attention", 2),
    ],
)
def test_answers_of_one_process(
    base: Path,
    adapters: AdapterConfig,
    expected: dict[str, Answer],
    ranks: tuple[int, int],
    router: str,
    shards: int,
) -> None:
    built = build_cluster(of(base, adapters, ranks, router, shards), make_starter=ThreadStarter)
    try:
        assert answers(built) == expected
        assert answers(built) == expected, "with warm prefixes"
        some = [
            each for i, each in enumerate(mixed(built.adapters)) if NAMES[i % 5] in (None, "lora")
        ]
        found = serve(built.engine, some)
        assert found == {key: expected[key] for key in found}, "no adapter with experts among them"
    finally:
        built.engine.close()


@pytest.mark.parametrize("family", ["deepseek_v3-groups", "granitemoe-shared", "gpt_oss"])
def test_shards_of_other_attention(family: str, tmp_path: Path) -> None:
    """Latent attention, multipliers and sinks, with fine-tunes that change every part."""
    base, folders = write_checkpoint(tmp_path / "base", CASES[family]), {}
    for seed, name in enumerate(("one", "two")):
        tuned = write_fine_tune(tmp_path / f"tuned{seed}", base, seed=seed)
        make_bitdelta(base, tuned, tmp_path / name)
        folders[name] = tmp_path / name
    folders["lora"] = write_lora(tmp_path / "lora", base)
    modules = tuple(f"{name}={folder}" for name, folder in folders.items())
    made = AdapterConfig(is_enabled=True, modules=modules)
    names = (None, *folders)
    alone = build_engine(of(base, made, (0, 0)))
    wanted = serve(alone.engine, mixed(alone.adapters, 6, names))
    built = build_cluster(of(base, made, (1, 1), "attention", 2), make_starter=ThreadStarter)
    try:
        assert serve(built.engine, mixed(built.adapters, 6, names)) == wanted
    finally:
        built.engine.close()


def test_answers_while_experts_move(
    base: Path, adapters: AdapterConfig, expected: dict[str, Answer]
) -> None:
    made = of(base, adapters, (1, 2))
    cluster = replace(made.cluster, rebalance="manual", rebalance_max_moves=64)
    with FaultDrive(replace(made, cluster=cluster), ThreadStarter) as drive:
        moves = Moves(drive)
        at = {3: lambda: moves.move_to(moves.shuffled(1))}
        found = moves.serve(mixed(drive.adapters), at, until=lambda: bool(moves.ends))
        assert found == expected
        assert [end.why for end in moves.ends] == [None] and moves.mover.num_copies > 0
        assert serve(drive.engine, mixed(drive.adapters)) == expected, "after the move"


def test_an_esft_has_the_bits_of_the_merged_checkpoint(
    base: Path, adapters: AdapterConfig, expected: dict[str, Answer], tmp_path: Path
) -> None:
    esft = Path(adapters.modules[1].partition("=")[2])
    merged = write_merged(tmp_path / "merged", base, esft)
    built = build_cluster(of(merged, AdapterConfig(), (2, 3)), make_starter=ThreadStarter)
    try:
        wanted = requests(8, VOCAB_SIZE, num_tokens=4)[1::5]
        found = serve(built.engine, wanted)
    finally:
        built.engine.close()
    assert found == {key: expected[key] for key in ("r1", "r6")}


def test_messages_have_the_size_that_they_have_without_adapters(
    base: Path, adapters: AdapterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    send = DataGroup.send

    def counted(group: DataGroup, peer: str, buffer: Tensor, tag: int, what: object) -> Transfer:
        sizes.append(buffer.nbytes)
        return send(group, peer, buffer, tag, what)

    monkeypatch.setattr(DataGroup, "send", counted)
    monkeypatch.setattr(NativeLanes, "is_usable", False)  # these send without the group
    found = []
    for each in (AdapterConfig(), adapters):
        built = build_cluster(of(base, each, (1, 1)), make_starter=ThreadStarter)
        try:
            if built.adapters is None:
                serve(built.engine, requests(8, VOCAB_SIZE, num_tokens=4))
            else:
                answers(built)
        finally:
            built.engine.close()
        found.append(sorted(sizes))
        sizes.clear()
    assert found[0] == found[1] and len(found[0]) > 100


class Drive:
    """Ranks as threads, some of which end while requests run."""

    def __init__(self, config: EngineConfig) -> None:
        self.starter: ThreadStarter | None = None
        self.built = build_cluster(config, make_starter=self._starter)
        engine = self.built.engine
        assert isinstance(engine, ClusterEngine)
        self.engine, self._step, self._due = engine, engine.step, list[str]()

    def _starter(self, host: str, port: int, secret: ClusterSecret, threads: int) -> ThreadStarter:
        self.starter = ThreadStarter(host, port, secret, threads)
        return self.starter

    def lose(self, name: str) -> None:
        """Ends a rank."""
        assert self.starter is not None
        self.starter.kill(next(each for each in all_ranks(2, 2) if str(each) == name))

    def wait_until_whole(self) -> None:
        """Steps until all ranks serve."""
        deadline = time.monotonic() + 60
        while any(each.phase != "serving" for each in self.engine.stats().members):
            assert time.monotonic() < deadline, self.engine.stats().members
            self.engine.step()
            time.sleep(0.01)

    def serve_while_losing(self, names: Sequence[str]) -> dict[str, Answer]:
        """Serves, and after every fifth step ends another rank."""
        count, left = itertools.count(1), list(names)

        def step() -> list[TokenDelta]:
            if left and next(count) % 5 == 0:
                self.lose(left.pop())
            return self._step()

        self.engine.step = step  # type: ignore[method-assign]
        try:
            return answers(self.built)
        finally:
            self.engine.step = self._step  # type: ignore[method-assign]
            assert not left


@pytest.fixture
def drive(base: Path, adapters: AdapterConfig, request: pytest.FixtureRequest) -> Iterator[Drive]:
    made = Drive(of(base, adapters, (2, 2), getattr(request, "param", "auto")))
    yield made
    made.engine.close()


def test_lost_ranks_load_adapters_again(drive: Drive, expected: dict[str, Answer]) -> None:
    assert drive.serve_while_losing(["expert-0", "attention-1"]) == expected
    drive.wait_until_whole()
    assert answers(drive.built) == expected


def test_loading_and_unloading(
    drive: Drive, base: Path, expected: dict[str, Answer], adapters: AdapterConfig
) -> None:
    registry, root = drive.built.adapters, adapters.root
    assert registry is not None and root is not None
    other = write_esft(Path(root) / "other", base, {0: [5], 2: [1]}, seed=5)
    first = registry.load_below_root("more", "other")
    held = registry.acquire("more")  # as a request does
    before = replace(requests(1, VOCAB_SIZE)[0], adapter=held)
    write_esft(other, base, {0: [5], 2: [1]}, seed=6)
    assert registry.load_below_root("more", "other").digest != first.digest
    registry.unload("more")
    alone = serve(drive.engine, [before])  # the version that it holds
    shutil.rmtree(other)
    assert serve(drive.engine, [replace(before, request_id="r0")]) == alone
    del before, held
    assert answers(drive.built) == expected
    gc.collect()
    _wait_for_numbers(drive, 4)


def _wait_for_numbers(drive: Drive, count: int) -> None:
    """Waits until the ranks were told to drop all but some adapters."""
    own = drive.engine._coordinator.membership.adapters  # type: ignore[attr-defined]
    orders = own._shared.orders.by_number
    deadline = time.monotonic() + 20
    while len(orders) != count:
        assert time.monotonic() < deadline, orders
        time.sleep(0.01)


@pytest.mark.parametrize("drive", ["attention", "experts"], indirect=True)  # which rank routes
def test_files_that_are_gone_when_a_rank_starts_again(
    drive: Drive, base: Path, adapters: AdapterConfig
) -> None:
    """Only requests of this adapter fail; none gets another model's answer."""
    registry, root = drive.built.adapters, adapters.root
    assert registry is not None and root is not None
    gone = write_esft(Path(root) / "gone", base, {0: [5], 1: [1]}, seed=5)
    registry.load_below_root("gone", "gone")
    wanted = requests(4, VOCAB_SIZE)
    held = [None, registry.acquire("gone"), registry.acquire("lora"), registry.acquire("esft")]
    whole = [replace(r, adapter=a) for r, a in zip(wanted, held, strict=True)]
    before = serve(drive.engine, whole)
    shutil.rmtree(gone)
    drive.lose("expert-1")
    drive.wait_until_whole()
    found = serve(drive.engine, whole)
    assert "its step failed" in str(found.pop("r1").error)
    assert found == {key: before[key] for key in ("r0", "r2", "r3")}
    with pytest.raises(InvalidRequestError, match="cannot be read again: .*gone is not a folder"):
        registry.acquire("gone")


def test_bad_adapters_are_refused_by_the_ranks(drive: Drive, base: Path, tmp_path: Path) -> None:
    registry = drive.built.adapters
    assert registry is not None
    bad = write_esft(tmp_path / "bad", base, {2: [3]})
    weights = {k: torch.full_like(t, torch.nan) for k, t in tensors_of(bad).items()}
    save_file(weights, bad / "model.safetensors")
    with pytest.raises(CheckpointError, match="layers.2.*has values that are not finite"):
        registry.load("bad", bad)
    wrong = write_lora(tmp_path / "wrong", base, rank=4)
    (wrong / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 5, "lora_alpha": 1}')
    with pytest.raises(CheckpointError, match="the rank and the base model need"):
        registry.load("wrong", wrong)
    _wait_for_numbers(drive, 4)


def test_an_adapter_that_cannot_be_served_is_refused_at_the_start(
    base: Path, tmp_path: Path
) -> None:
    bad = AdapterConfig(is_enabled=True, modules=(f"none={tmp_path / 'none'}",))
    before = set(threading.enumerate())  # other tests may have left some
    with pytest.raises(ConfigError, match="adapters.modules, 'none': .*none is not a folder"):
        build_cluster(of(base, bad, (1, 1)), make_starter=ThreadStarter)
    ranks = [each for each in set(threading.enumerate()) - before if "_live" in each.name]
    assert not any(each.is_alive() for each in ranks)


def test_norms_over_all_heads_are_refused_with_shards(
    adapters: AdapterConfig, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "base", CASES["minimax_m2"])
    with pytest.raises(ConfigError, match="norms the queries of all heads together"):
        build_cluster(of(folder, adapters, (1, 1), shards=2), make_starter=ThreadStarter)
