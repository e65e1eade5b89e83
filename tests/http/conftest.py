"""A scripted engine, a tiny tokenizer and the application on top of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
import tokenizers
from fastapi import FastAPI
from starlette.testclient import TestClient
from tokenizers import decoders, models, pre_tokenizers

from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.cache.tiers.store import TierStats
from moe_serve.config.sections import DEFAULT_SCHEDULER, SchedulerConfig, ServerConfig
from moe_serve.engine.request.delta_queue import DeltaQueue
from moe_serve.engine.request.draft_counts import DraftCounts
from moe_serve.engine.request.first_token import AdmissionCheck
from moe_serve.engine.request.request import (
    DraftResult,
    FinishReason,
    GenerationRequest,
    TokenDelta,
    TokenExperts,
    TokenLogprob,
)
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.service_stats import ServiceStats
from moe_serve.engine.request.stats import EngineCounts, EngineLoad, EngineStats, PoolStats
from moe_serve.engine.request.step_tokens import StepTokens
from moe_serve.errors import ServerOverloadedError
from moe_serve.http.app import create_app
from moe_serve.http.dashboard.facts import NO_FACTS, DashboardFacts
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.http.server import DrainingServer, bind
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.tokenizer import Tokenizer

EOS_ID = 256
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte: id = the byte's place in the sorted byte alphabet; 256 is <|end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, eos_token_ids=[EOS_ID])


@dataclass
class FakeEngine:
    """Plays a script: `script(request)` returns the answer's text, which comes as `tokens_per_step`
    byte tokens per step.

    A test that sets `gate` decides when steps happen. Otherwise they follow each other at once or,
    with `at_readers_pace`, each step waits until the one before was read.
    """

    tokenizer: Tokenizer
    script: Callable[[GenerationRequest], str] = lambda request: "Hello"
    max_model_len: int = 512
    vocab_size: int = 257
    tokens_per_step: int = 1
    step_s: float = 0.0
    gate: asyncio.Event | None = None
    at_readers_pace: bool = False
    max_requests: int = 1000
    error_after: int | None = None
    error_code: str | None = None  # of that error
    submitted: list[GenerationRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    is_draining: bool = False
    is_alive: bool = True
    num_steps: int = 0
    num_waiting: int = 0
    last_turn_age_s: float | None = None
    pools: PoolStats | None = None
    outage_s: float = 0.0
    step_tokens: StepTokens = StepTokens()
    drafter: str | None = None  # steps of several tokens verified its drafts, of which all but one
    # token were accepted
    drafts: DraftCounts = DraftCounts()
    tier: TierStats | None = None
    admission: AdmissionCheck | None = None
    service: ServiceStats | None = None

    def submit(self, requests: Sequence[GenerationRequest]) -> DeltaQueue:
        if self.is_draining:
            raise ServerOverloadedError("draining", retry_after_s=2.0, is_draining=True)
        if len(self.running) + len(requests) > self.max_requests:
            raise ServerOverloadedError("The queue is full.", retry_after_s=0.2)
        queue = DeltaQueue()
        for request in requests:
            self.submitted.append(request)
            task = asyncio.get_running_loop().create_task(self._play(request, queue))
            self.running[request.request_id] = task
            task.add_done_callback(lambda _, key=request.request_id: self.running.pop(key, None))
        return queue

    def abort(self, request_id: str) -> None:
        if task := self.running.pop(request_id, None):
            task.cancel()
        self.aborted.append(request_id)  # last: tests on other threads wait for it

    def stats(self) -> EngineStats:
        return EngineStats(
            num_steps=self.num_steps,
            load=EngineLoad(
                num_running=len(self.running),
                num_waiting=self.num_waiting,
                num_pages=10,
                num_free_pages=10 - len(self.running),
                num_cached_pages=4,
            ),
            counts=EngineCounts(
                num_preemptions=1,
                num_prompt_tokens=7,
                num_generated_tokens=self.num_steps,
                num_evicted_pages=2,
                num_queried_tokens=70,
                num_hit_tokens=30,
                num_missed_tokens=40,
                step_tokens=self.step_tokens,
                drafts=self.drafts,
            ),
            is_alive=self.is_alive,
            last_turn_age_s=self.last_turn_age_s,
            pools=self.pools,
            tier=self.tier,
            service=self.service,
            outage_s=self.outage_s,
        )

    def begin_drain(self) -> None:
        self.is_draining = True

    async def _play(self, request: GenerationRequest, queue: DeltaQueue) -> None:
        for delta in self._runs(request):
            await asyncio.sleep(self.step_s)
            if self.gate is not None:
                await self.gate.wait()
            self.num_steps += 1
            queue.put(delta)
            while self.at_readers_pace and not queue.is_empty:
                await asyncio.sleep(0)

    def _runs(self, request: GenerationRequest) -> Iterator[TokenDelta]:
        """Yields deltas of `tokens_per_step` tokens each."""
        deltas = self._deltas(request)
        while run := list(itertools.islice(deltas, self.tokens_per_step)):
            joined = run[-1] if len(run) == 1 else _joined(run)
            if self.drafter is not None and request.may_draft:
                drafted = DraftResult(self.drafter, len(run), len(run) - 1)
                joined = msgspec.structs.replace(joined, drafted=drafted)
            yield joined

    def _deltas(self, request: GenerationRequest) -> Iterator[TokenDelta]:
        params, rules = request.params, request.rules
        text_ids = self.tokenizer.encode(self.script(request))
        limit = rules.max_tokens or self.max_model_len - len(request.prompt_token_ids)
        ids = [*text_ids, EOS_ID][:limit]
        for i, token in enumerate(ids):
            if self.error_after is not None and i >= self.error_after:
                yield TokenDelta(
                    request_id=request.request_id,
                    finish_reason=FinishReason.ERROR,
                    error="secret internals",
                    error_code=self.error_code,
                )
                return
            is_stop = token == EOS_ID or token in params.stop_token_ids
            is_last = is_stop or i == len(ids) - 1
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
            delta = TokenDelta(
                request_id=request.request_id,
                token_ids=(token,),
                logprobs=_logprobs(token, params),
                finish_reason=reason if is_last else None,
                stop_token_id=token if is_stop else None,
                num_cached_tokens=3,
                routed_experts=(_experts(i),) if request.wants_routed_experts else None,
                started_at=request.arrival_time + 1e-6,
            )
            if i == 0 and rules.prompt_logprobs is not None:
                rest = [_logprob(t, rules.prompt_logprobs) for t in request.prompt_token_ids[1:]]
                delta = msgspec.structs.replace(delta, prompt_logprobs=(None, *rest))
            yield delta
            if is_last:
                return


def _joined(run: Sequence[TokenDelta]) -> TokenDelta:
    """Joins several deltas into one."""

    def all_of(name: str) -> Any:
        return tuple(item for delta in run for item in getattr(delta, name) or ()) or None

    return msgspec.structs.replace(
        run[-1],
        token_ids=all_of("token_ids") or (),
        logprobs=all_of("logprobs"),
        routed_experts=all_of("routed_experts"),
        prompt_logprobs=run[0].prompt_logprobs,
    )


def _experts(place: int) -> TokenExperts:
    """Returns experts of two layers, two of each, from which the token's `place` can be told."""
    return TokenExperts(bytes([place, 100, 101, place]), 2, 2)


def _logprobs(token: int, params: SamplingParams) -> tuple[TokenLogprob, ...] | None:
    if params.logprobs is None:
        return None
    if not params.logprob_token_ids:
        return (_logprob(token, params.logprobs),)
    named = [(other, -9.0) for other in params.logprob_token_ids if other != token]
    return (TokenLogprob(token_id=token, logprob=-0.5, rank=1, top=((token, -0.5), *named)),)


def _logprob(token: int, num_top: int) -> TokenLogprob:
    top = tuple((other, -0.5 - rank) for rank, other in enumerate([token, 1, 2][:num_top]))
    return TokenLogprob(token_id=token, logprob=-0.5, rank=1, top=top)


class LiveServer:
    """The server on a thread; leaving the block drains it and joins the thread."""

    def __init__(self, app: FastAPI, engine: Any, config: ServerConfig) -> None:
        self._ready = threading.Event()
        self.port = 0
        self.engine = engine
        self._listener = bind("127.0.0.1", 0)
        self.server = DrainingServer(app, engine, config, self._on_ready)
        self._thread = threading.Thread(target=self.server.run, args=([self._listener],))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()
        self._thread.join(60)
        self._listener.close()
        assert not self._thread.is_alive(), "the server did not end"

    def shut_down(self) -> None:
        assert self.server._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self.server._loop.call_soon_threadsafe(self.server.begin_shutdown)

    def open_gate(self) -> None:
        assert self.server._loop is not None
        self.server._loop.call_soon_threadsafe(self.engine.gate.set)

    def _on_ready(self, host: str, port: int) -> None:
        assert host == "127.0.0.1"
        self.port = port
        self._ready.set()


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while there is work and then jumps to the next timer,
    so that the order of events does not depend on the machine."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def select_at_once(timeout: float | None = None) -> Any:
            assert timeout is not None, "nothing will ever happen"
            self._now += timeout
            return select(0)

        selector.select = select_at_once

    def time(self) -> float:
        return self._now


@pytest.fixture
def run_in_virtual_time() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Returns a function like `asyncio.run`, for code that uses no other thread or process."""

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        with contextlib.closing(_VirtualTimeLoop()) as loop:
            return loop.run_until_complete(main)

    return run


@pytest.fixture
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


CHAT_TEMPLATE = ChatTemplate(TEMPLATE)  # one for all tests: each has a process of its own


def tiny_model(tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(
        name="tiny",
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
        created=1_700_000_000,
        max_model_len=512,
    )


@pytest.fixture
def model(tokenizer: Tokenizer) -> ServedModel:
    return tiny_model(tokenizer)


@pytest.fixture
def make_app(engine: FakeEngine, model: ServedModel) -> Callable[..., FastAPI]:
    def make(
        facts: DashboardFacts = NO_FACTS,
        scheduler: SchedulerConfig = DEFAULT_SCHEDULER,
        adapters: AdapterRegistry | None = None,
        **config: Any,
    ) -> FastAPI:
        server = ServerConfig(**config)
        served = replace(model, adapters=adapters)
        return create_app(engine, served, server, facts=facts, scheduler=scheduler)

    return make


@pytest.fixture
def client(make_app: Callable[..., FastAPI]) -> Iterator[TestClient]:
    with TestClient(make_app()) as test_client:
        yield test_client


StartServed = Callable[..., tuple[TestClient, FakeEngine]]


@contextlib.contextmanager
def _serving_templates(tokenizer: Tokenizer) -> Iterator[StartServed]:
    """Yields a function that makes a client and its engine for a chat template and a tokenizer."""
    apps: list[FastAPI] = []
    templates: list[ChatTemplate] = []
    clients = contextlib.ExitStack()  # of open ones: others start a loop for every request

    def start(
        template: str, own: Tokenizer | None = None, **config: Any
    ) -> tuple[TestClient, FakeEngine]:
        used = own or tokenizer
        engine = FakeEngine(used, vocab_size=used.vocab_size, max_model_len=2048)
        chat_template = ChatTemplate(template)
        templates.append(chat_template)
        model = replace(tiny_model(used), chat_template=chat_template, max_model_len=2048)
        apps.append(create_app(engine, model, ServerConfig(**config)))
        return clients.enter_context(TestClient(apps[-1])), engine

    with clients:
        yield start
    for app in apps:
        app.state.gate.close()
    for template in templates:
        template.close()


@pytest.fixture
def start_served(tokenizer: Tokenizer) -> Iterator[StartServed]:
    with _serving_templates(tokenizer) as start:
        yield start


@pytest.fixture(scope="module")
def start_served_once() -> Iterator[StartServed]:
    """Serves chat templates for tests that share a server; each template has its own processes."""
    with _serving_templates(byte_tokenizer()) as start:
        yield start


@pytest.fixture
def start_live(engine: FakeEngine) -> Callable[[FastAPI], LiveServer]:
    def start(app: FastAPI) -> LiveServer:
        return LiveServer(app, engine, ServerConfig(drain_timeout_s=30.0))

    return start


@pytest.fixture
def live_server() -> type[LiveServer]:
    """Serves with a configuration that the server needs too, not only the application."""
    return LiveServer


@pytest.fixture
def live(make_app: Callable[..., FastAPI], start_live: Any) -> Iterator[LiveServer]:
    with start_live(make_app()) as server:
        yield server


@pytest.fixture(scope="session")
def serve_live() -> Callable[[FastAPI, Any], LiveServer]:
    """Serves any application and engine on a port."""
    return lambda app, engine: LiveServer(app, engine, ServerConfig(drain_timeout_s=30.0))


@pytest.fixture(scope="session")
def new_server() -> Callable[..., LiveServer]:
    """Makes servers with their own engine, for modules whose tests share a server."""

    def new(**config: Any) -> LiveServer:
        engine = FakeEngine(byte_tokenizer())
        app = create_app(engine, tiny_model(engine.tokenizer), ServerConfig(**config))
        return LiveServer(app, engine, ServerConfig(drain_timeout_s=30.0))

    return new


@pytest.fixture(scope="session")
def new_client() -> Callable[..., tuple[TestClient, FakeEngine]]:
    """Makes clients with their own application and engine, for modules whose tests share them."""

    def new(
        scheduler: SchedulerConfig = DEFAULT_SCHEDULER, **config: Any
    ) -> tuple[TestClient, FakeEngine]:
        engine = FakeEngine(byte_tokenizer())
        model, server = tiny_model(engine.tokenizer), ServerConfig(**config)
        app = create_app(engine, model, server, scheduler=scheduler)
        return TestClient(app), engine

    return new
