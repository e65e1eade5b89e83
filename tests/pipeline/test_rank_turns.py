"""Layers of ranks as single calls have the bits, the frames and the records of their parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from moe_kernels.kernel_choice import native_refusal
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.feed_forward import choose_experts
from moe_serve.model.step_plan import MicroBatch, RouteAsk, SequenceSlice, StepPlan
from moe_serve.pipeline.exchange.expert_loop import ExpertLoop
from moe_serve.pipeline.exchange.group_transport import GroupTransport
from moe_serve.pipeline.exchange.rank_services import RankServices
from moe_serve.pipeline.exchange.row_split import RowSplit
from moe_serve.pipeline.exchange.step_shape import StepShape
from moe_serve.pipeline.frames.frame_header import WireError
from moe_serve.pipeline.frames.wire import make_wire_format
from moe_serve.pipeline.links.data_group import DataGroup
from moe_serve.pipeline.links.shared_link import SharedLink
from moe_serve.pipeline.links.transfer import PeerLostError
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.rank_turns import RankTurns
from moe_serve.pipeline.route_tap import RouteTap
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.timeline.timeline_recorder import decode_records
from tests.support.families.all_cases import CASES
from tests.support.families.case import VOCAB_SIZE
from tests.support.families.parity import write_checkpoint

CPU = torch.device("cpu")
REFUSAL = native_refusal(CPU, torch.float32)
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
MODELS = ("gpt_oss", "qwen3_moe-dense-layers", "dots1")
TOKENS = np.random.default_rng(3).integers(1, VOCAB_SIZE, (3, 60))
TABLES = ((4, 9, 1, 2), (7, 3), (5, 6, 8))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_checkpoint(root / name, CASES[name]) for name in MODELS}


def piece(sequence: int, start: int, end: int, num_logits: int) -> SequenceSlice:
    ids = TOKENS[sequence, start:end]
    return SequenceSlice(sequence, start, ids, TABLES[sequence], num_logits)


def plans() -> list[StepPlan]:
    """Returns prompts, a step that decodes and reads, and steps of two micro-batches; the last two,
    which ask for no routes, are not recorded."""
    ask = RouteAsk(frozenset([0, 2]), has_weights=True)
    whole = [piece(0, 0, 33, 1), piece(1, 0, 17, 0)]
    mixed = [piece(0, 33, 34, 1), piece(1, 17, 20, 1), piece(2, 0, 40, 40)]
    two = [
        MicroBatch((piece(0, 34, 35, 1), piece(1, 20, 21, 1))),
        MicroBatch((piece(2, 40, 42, 2),)),
    ]
    apart = StepPlan((MicroBatch((piece(0, 35, 36, 1),)), MicroBatch((piece(2, 42, 43, 1),))), None)
    last = (piece(0, 36, 37, 1), piece(1, 21, 24, 1), piece(2, 43, 44, 1))
    return [*(StepPlan((MicroBatch(tuple(step)),), ask) for step in (whole, mixed)),
            StepPlan(tuple(two), ask), apart, StepPlan((MicroBatch(last),), None)]  # fmt: skip


class Ranks:
    """Attention ranks (each a pipeline) and expert ranks (each a loop on a thread)."""

    def __init__(
        self, loader: ModelLoader, groups: dict[str, DataGroup], *, routes: bool, is_native: bool
    ) -> None:
        spec, names = loader.spec, list(groups)
        self.experts = [name for name in names if name.startswith("expert")]
        self.attention = [name for name in names if name not in self.experts]
        sparse = [i for i, layer in enumerate(spec.layers) if layer.is_sparse]
        count, num_experts = len(self.experts), spec.router.num_experts
        # the last expert is everywhere, so its copies take turns
        places = [[e * count // num_experts] for e in range(num_experts)]
        places[-1] = list(range(count))
        split = RowSplit(dict.fromkeys(sparse, places), count)
        wire = make_wire_format(spec.width, spec.router.top_k, loader.dtype, count)
        self.loops, self.pipelines, self.caches = [], [], []
        self.transports = []
        for rank, name in enumerate(self.experts):
            held = [e for e in range(num_experts) if rank in places[e]]
            stage = loader.expert_stage(
                [held if i in sparse else () for i in range(len(spec.layers))]
            )
            routers = loader.routers()
            services = RankServices.of(
                loader.kernels, stage, wire, num_ranks=count, rank=rank, router=spec.router,
                routers=routers if routes else None, split=split if routes else None,
            )  # fmt: skip
            assert services is not None, "these ranks have single calls"

            def route(layer: int, x_TD: torch.Tensor, routers: Any = routers) -> Any:
                return choose_experts(loader.kernels, spec.router, routers[layer], x_TD)

            self.loops.append(
                ExpertLoop(
                    groups[name], stage, expert_rank=rank, attention_ranks=self.attention,
                    wire=wire, sparse_layers=sparse, route=route if routes else None,
                    split=split if routes else None, log=StageLog(),
                    services=services if is_native else None,
                )
            )  # fmt: skip
        for rank, name in enumerate(self.attention):
            cache, tap = KVCache(spec, 10, 16, loader.dtype, CPU), RouteTap(num_experts)
            log, attention = StageLog(is_recording=True), loader.attention_stage(64)
            transport = GroupTransport(
                groups[name], attention_rank=rank, expert_ranks=self.experts, wire=wire,
                split=None if routes else split, sparse_layers=sparse, log=log,
            )  # fmt: skip
            pipeline = Pipeline(attention, transport, cache, CPU, log, tap)
            if is_native:
                pipeline.turns = RankTurns.of(attention, cache, transport, log, tap)
                assert pipeline.turns is not None, "these ranks have single calls"
            self.pipelines.append((pipeline, tap, log))
            self.transports.append(transport)
            self.caches.append(cache)

    def step(self, number: int, plan: StepPlan, pool: ThreadPoolExecutor) -> list[Any]:
        """Runs the same plan on every attention rank; returns logits and choices of each."""
        rows = tuple(batch.num_tokens for batch in plan.micro_batches)
        shape = StepShape(1, number, (rows,) * len(self.attention))
        loops = [pool.submit(loop.run, shape) for loop in self.loops]
        runs = [pool.submit(self._run, shape, index, plan) for index in range(len(self.attention))]
        done = [run.result(60.0) for run in runs]
        for loop in loops:
            loop.result(60.0)
        return done

    def _run(self, shape: StepShape, index: int, plan: StepPlan) -> Any:
        pipeline, tap, log = self.pipelines[index]
        self.transports[index].begin(shape)
        log._is_recording = plan.routes is not None
        log.begin(shape.step)
        logits = pipeline.run(plan)
        choices = tap.end(plan)
        records = decode_records(log.take()).records
        stages = {(r["layer"], r["stage"], r["micro_batch"]) for r in records}
        found = [] if choices is None else [choices.expert_ids_NLK, choices.weights_NLK]
        return logits, found, stages

    def close(self) -> None:
        for each in (*self.transports, *self.loops):
            each.close()


@contextmanager
def ranks_of(
    loader: ModelLoader, attention: int, experts: int, *, routes: bool, is_native: bool
) -> Iterator[tuple[Ranks, ThreadPoolExecutor]]:
    sides = [f"attention-{i}" for i in range(attention)], [f"expert-{i}" for i in range(experts)]
    members, store = [*sides[0], *sides[1]], HashStore()

    def meet(me: str) -> DataGroup:
        peers = sides[1] if me in sides[0] else sides[0]
        return DataGroup(
            members, me, peers, store, epoch=1, host="127.0.0.1", timeout_s=60.0, device=CPU
        )

    with ThreadPoolExecutor(len(members)) as pool:
        met = {name: pool.submit(meet, name) for name in members}
        groups = {name: future.result(60.0) for name, future in met.items()}
        ranks = Ranks(loader, groups, routes=routes, is_native=is_native)
        try:
            yield ranks, pool
        finally:
            ranks.close()
            for group in groups.values():
                group.close()


def count_exchanges(ranks: Ranks) -> list[int]:
    """Returns a list that gets the numbers of exchanges that calls of several layers have sent."""
    found: list[int] = []
    for pipeline, _, _ in ranks.pipelines:
        turns = pipeline.turns
        assert turns is not None, "these ranks have single calls"

        def run_step(first: int, states: Any, of: Any = turns.run_step) -> int:
            if number := of(first, states):
                found.append(number)
            return number

        turns.run_step = run_step  # type: ignore[method-assign]
    return found


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("attention", "experts", "routes"), [(1, 1, False), (2, 3, False), (2, 2, True), (1, 1, True)]
)
@pytest.mark.parametrize("name", MODELS)
def test_single_calls_have_the_bits_of_their_parts(
    folders: dict[str, Path],
    name: str,
    attention: int,
    experts: int,
    routes: bool,
    dtype: torch.dtype,
) -> None:
    loader = ModelLoader(folders[name], kernels="native", dtype=dtype, num_threads=1)
    of = attention, experts
    with (
        ranks_of(loader, *of, routes=routes, is_native=True) as (single, pool),
        ranks_of(loader, *of, routes=routes, is_native=False) as (parts, other_pool),
    ):
        passed = count_exchanges(single)
        for number, plan in enumerate(plans()):
            got, wanted = single.step(number, plan, pool), parts.step(number, plan, other_pool)
            for mine, theirs in zip(got, wanted, strict=True):
                assert torch.equal(mine[0], theirs[0]), f"step {number}"
                for choices, expected in zip(mine[1], theirs[1], strict=True):
                    assert np.array_equal(choices, expected), f"step {number}"
                assert mine[2] == theirs[2], f"the records of step {number}"
        sparse = [layer.is_sparse for layer in loader.spec.layers]
        num_joined = sum(a and b for a, b in itertools.pairwise(sparse))  # messages between layers
        assert sum(passed) == 3 * num_joined * attention, "micro-batches of steps not recorded"
        for mine, theirs in zip(single.caches, parts.caches, strict=True):
            for layer, expected in zip(mine.layers, theirs.layers, strict=True):
                assert torch.equal(layer.keys, expected.keys)
                assert torch.equal(layer.values, expected.values)


def test_an_expert_rank_that_fails_is_named_and_the_next_step_works(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = ModelLoader(folders["gpt_oss"], kernels="native", num_threads=1)
    prompt, following = plans()[:2]
    with ranks_of(loader, 1, 2, routes=False, is_native=True) as (ranks, pool):
        stage, services = ranks.loops[1]._stage, ranks.loops[1]._services
        assert services is not None, "its layers are single calls"

        def partial(*_: Any) -> Any:
            raise RuntimeError("no such luck")

        with monkeypatch.context() as patch:
            patch.setattr(services, "step_layers", lambda *_: None)
            patch.setattr(services, "serve", lambda *_: None)
            patch.setattr(stage, "partial", partial)
            shape = StepShape(1, 0, ((prompt.micro_batches[0].num_tokens,),))
            loops = [pool.submit(loop.run, shape) for loop in ranks.loops]
            with pytest.raises(WireError, match="layer 0, micro-batch 0: expert-1 failed"):
                ranks._run(shape, 0, prompt)
            ranks.transports[0].abandon()
            for loop in loops:
                loop.result(60.0)
            assert ranks.loops[1].failure is not None, "it is reported"
        for number, plan in enumerate((prompt, following), 1):
            ((logits, _, _),) = ranks.step(number, plan, pool)
            assert logits.isfinite().all()


def unrecorded(*pieces: SequenceSlice) -> StepPlan:
    return StepPlan((MicroBatch(pieces),))


def test_a_layer_that_fails_within_a_call_of_several_is_named(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = ModelLoader(folders["gpt_oss"], kernels="native", num_threads=1)
    with ranks_of(loader, 1, 2, routes=False, is_native=True) as (ranks, pool):
        ranks.step(0, unrecorded(piece(0, 0, 33, 1)), pool)
        stage, services = ranks.loops[1]._stage, ranks.loops[1]._services
        assert services is not None, "its layers are single calls"
        serve, decode = services.serve, unrecorded(piece(0, 33, 34, 1))
        ((before, _, _),) = ranks.step(1, decode, pool)

        def only_some(bank: Any, exchange: Any, *parts: Any) -> Any:
            return None if exchange.layer == 2 else serve(bank, exchange, *parts)

        def partial(*_: Any) -> Any:
            raise RuntimeError("no such luck")

        passed = count_exchanges(ranks)
        with monkeypatch.context() as patch:
            patch.setattr(services, "step_layers", lambda *_: None)
            patch.setattr(services, "serve", only_some)
            patch.setattr(stage, "partial", partial)
            shape = StepShape(1, 2, ((1,),))
            loops = [pool.submit(loop.run, shape) for loop in ranks.loops]
            with pytest.raises(WireError, match="layer 2, micro-batch 0: expert-1 failed"):
                ranks._run(shape, 0, decode)
            ranks.transports[0].abandon()
            for loop in loops:
                loop.result(60.0)
        assert passed == [2], "layers 1 and 2 were sent by one call"
        ((after, _, _),) = ranks.step(3, decode, pool)
        assert torch.equal(before, after)


def links_of(group: DataGroup) -> list[SharedLink]:
    links = group.shared_links(list(group._links))
    assert links is not None, "all ranks are on this host"
    return links


@pytest.mark.parametrize("how", ["silent", "closed"])
def test_a_peer_that_is_lost_within_a_call_of_several_layers_is_named(
    folders: dict[str, Path], how: str
) -> None:
    loader = ModelLoader(folders["gpt_oss"], kernels="native", num_threads=1)
    with ranks_of(loader, 1, 1, routes=False, is_native=True) as (ranks, pool):
        for number, end in enumerate((17, 18)):
            start = 0 if number == 0 else 17
            ranks.step(number, unrecorded(piece(0, start, end, 1)), pool)
        why = "(the peer closed the connection|Connection reset by peer)"
        group = ranks.loops[0]._group
        if how == "silent":
            why = "silent for 0.05 s"
            for each in (ranks.transports[0]._group, group):
                for link in links_of(each):
                    link._timeout_s, link._lane, link._is_mapped = 0.05, None, False
        else:
            pool.submit(lambda: links_of(group)[0].has_message(60.0) and group.close())
        where = "step 2, layer 0, micro-batch 0"
        with pytest.raises(PeerLostError, match=rf"expert-0 is lost \(combine of {where}\): {why}"):
            ranks._run(StepShape(1, 2, ((1,),)), 0, unrecorded(piece(0, 18, 19, 1)))
        if how == "silent":
            where = "step 2, layer 1, micro-batch 0"  # the rows of layer 0 have arrived
            lost = rf"attention-0 is lost \(dispatch of {where}\): {why}"
            with pytest.raises(PeerLostError, match=lost):
                ranks.loops[0].run(StepShape(1, 2, ((1,),)))
