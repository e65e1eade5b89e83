"""`priority` from the HTTP field to the scheduler: the real engine behind the real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from moe_serve.config.sections import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import build_engine
from moe_serve.engine.request.delta_queue import DeltaQueue
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.http.app import create_app
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.tokenizer import Tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PATIENCE_S = 200.0


class OneSeat:
    """A demonstration model that answers one sequence at a time, and only while `goes` is set."""

    def __init__(self) -> None:
        config = EngineConfig(
            model=ModelConfig(num_threads=1),
            cache=CacheConfig(num_pages=256),
            scheduler=SchedulerConfig(max_num_seqs=1, max_passed_over_s=3600.0),
        )
        built, folder = build_engine(config), demo_model_folder()
        self.goes, self.is_at_step = threading.Event(), threading.Event()
        self.came = threading.Semaphore(0)
        self.ended: list[int | None] = []  # the seed of each, in the order of their last tokens
        self._seed_of: dict[str, int | None] = {}
        self.engine = AsyncEngine(built, config.scheduler)
        self._watch(built.engine.step, self.engine.submit)
        tokenizer = Tokenizer.load(folder)
        model = ServedModel(
            name="demo",
            tokenizer=tokenizer,
            chat_template=ChatTemplate.load(folder, special_tokens=tokenizer.special_tokens),
            created=0,
            max_model_len=self.engine.max_model_len,
        )
        self.app = create_app(self.engine, model, ServerConfig(key_min_priority=-(2**31)))

    def _watch(self, step: Any, submit: Any) -> None:
        def held() -> list[TokenDelta]:
            self.is_at_step.set()
            assert self.goes.wait(PATIENCE_S), "nobody let the engine go on"
            deltas: list[TokenDelta] = step()
            ends = [d.request_id for d in deltas if d.finish_reason is not None]
            self.ended += [self._seed_of[request_id] for request_id in ends]
            return deltas

        def noted(requests: Sequence[GenerationRequest]) -> DeltaQueue:
            self._seed_of |= {r.request_id: r.params.seed for r in requests}
            queue: DeltaQueue = submit(requests)
            self.came.release()
            return queue

        self.engine._engine.step = held  # type: ignore[method-assign]
        self.engine.submit = noted  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def served(serve_live: Any) -> Iterator[tuple[OneSeat, httpx.Client]]:
    seat = OneSeat()
    with (
        serve_live(seat.app, seat.engine) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S, trust_env=False) as client,
    ):
        yield seat, client
        seat.goes.set()
    seat.engine.close()


def ask(client: httpx.Client, route: str, **fields: Any) -> Any:
    words = {"messages": [{"role": "user", "content": "hi"}]} if route == CHAT else {"prompt": "hi"}
    body = {**words, "max_tokens": 6, "temperature": 1, "ignore_eos": True, **fields}
    response = client.post(route, json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice.get("text") or choice["message"]["content"]


def test_the_most_urgent_is_answered_first(served: tuple[OneSeat, httpx.Client]) -> None:
    """All requests come while the first one runs; each gets the answer that it gets alone."""
    seat, client = served
    wanted = [(CHAT, 3), (TEXT, None), (TEXT, -7), (CHAT, 2**31 - 1), (CHAT, -7), (TEXT, -(2**31))]
    with ThreadPoolExecutor(len(wanted)) as threads:
        answers = []
        for seed, (route, priority) in enumerate(wanted):
            fields = {"seed": seed, "priority": priority}
            answers.append(threads.submit(ask, client, route, **fields))
            assert seat.came.acquire(timeout=PATIENCE_S), "it was not submitted"
            assert seat.is_at_step.wait(PATIENCE_S), "the engine did not take it"
        seat.goes.set()
        texts = [answer.result() for answer in answers]
    assert seat.ended == [0, 5, 2, 4, 1, 3], "the first had the seat before the others came"
    alone = [ask(client, route, seed=seed) for seed, (route, _) in enumerate(wanted)]
    assert texts == alone
