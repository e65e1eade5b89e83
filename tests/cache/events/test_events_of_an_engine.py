"""The events of a real engine, as its configuration asks for them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from moe_serve.adapters.adapter import Adapter, AdapterVersion
from moe_serve.cache.events.change_record import ChangeRecord, PageOrigin
from moe_serve.config.event_config import KVEventsConfig
from moe_serve.config.sections import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.sampler import Sampler
from tests.support.cache.event_subscriber import Subscriber, blocks_of
from tests.support.engine.fake_runner import FakeRunner


def test_the_origin_of_a_page_is_that_of_its_request() -> None:
    version = AdapterVersion(
        name="sql", folder=Path("sql"), digest=b"1", kind="lora", rank=1, loaded_at=0, num_bytes=9
    )
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=(1,),
        params=SamplingParams(),
        cache_salt="s",
        adapter=Adapter(version=version, weights=cast(Any, None)),
    )
    assert request.page_origin == PageOrigin("sql", "s")
    assert replace(request, adapter=None, cache_salt="").page_origin == PageOrigin()


def test_a_subscriber_agrees_with_the_prefix_tree_of_a_model(tmp_path: Path) -> None:
    """Prompts of random prefixes, salts and answers, with more pages than the cache has."""
    events = KVEventsConfig(endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=f"ipc://{tmp_path}/r")
    built = build_engine(
        EngineConfig(
            model=ModelConfig(max_model_len=128, num_threads=1),
            cache=CacheConfig(num_pages=12),
            scheduler=SchedulerConfig(max_num_seqs=2),
            kv_events=events,
        )
    )
    engine, rng = built.engine, random.Random(1)
    assert isinstance(engine, Engine)
    follower = Subscriber(str(events.endpoint), str(events.replay_endpoint))
    stem = [rng.randrange(300, 900) for _ in range(80)]
    for index in range(16):
        prompt = stem[: rng.randint(1, 80)] + [rng.randrange(300, 900) for _ in range(20)]
        engine.add(
            GenerationRequest(
                request_id=f"r{index}",
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(max_tokens=rng.randint(1, 20), temperature=0.0),
                cache_salt=rng.choice(["", "tenant"]),
            )
        )
        for _ in range(rng.randint(0, 20)):
            engine.step()
    while engine.has_work:
        engine.step()
    tree = engine._scheduler.cache.tree
    expected = blocks_of(tree)
    roots = {block: known for block, known in expected.items() if known.parent is None}
    follower.follow(expected, with_origins=False)
    assert engine.stats().counts.num_evicted_pages > 0
    assert {follower.blocks[block].salt for block in roots} == {"", "tenant"}
    engine.close()
    follower.follow({})
    follower.close()


def test_pages_of_a_running_request_are_told_of_from_time_to_time() -> None:
    now = [0.0]
    record = ChangeRecord(lambda: None, lambda: None, lambda: now[0], give_after_s=2.0)
    engine = Engine(
        LocalExecutor(FakeRunner(), Sampler(frozenset())),
        scheduler=SchedulerConfig(),
        num_pages=40,
        micro_batches=1,
        max_model_len=160,
        eos_token_ids=frozenset(),
        listener=record,
    )
    params = SamplingParams(max_tokens=60, temperature=0.0)
    engine.add(GenerationRequest(request_id="r", prompt_token_ids=(3,) * 40, params=params))

    def told() -> int:
        engine.step()
        changes = record.take()
        return 0 if changes is None else len(changes.stored)

    assert [told() for _ in range(5)] == [0] * 5
    now[0] = 2.0
    assert [told() for _ in range(5)] == [2, 0, 0, 0, 0], "40 tokens fill two pages of 16"
    while engine.has_work:
        engine.step()
    changes = record.take()
    assert changes is not None and len(changes.stored) == 4, "the rest, at the end"
