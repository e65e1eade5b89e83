"""Drives an engine whose adapters come and go at random, and compares every answer.

One thread steps the engine and sends requests, as a server does; another loads, reloads and unloads
names. A request's answer, with its log probabilities, must be that of the content which its name
stood for when it came. So an answer by another adapter, or with cached pages of another one, is
found whatever the order of events was.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_serve.adapters.adapter import Adapter, AdapterVersion
from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.errors import CheckpointError, InvalidRequestError, ModelNotFoundError

Answer = tuple[object, ...]  # tokens and log probabilities, in order
Expected = Mapping[tuple[bytes, int], Answer]  # by digest (empty: the base model) and prompt
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
_MOST_RUNNING = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The frequency of each event, per request."""

    num_requests: int
    num_names: int
    load_share: float = 0.1
    unload_share: float = 0.03
    cancel_share: float = 0.05
    base_share: float = 0.2
    seed: int = 1


@dataclass(slots=True)
class Tally:
    """The counts of a run, and what went wrong."""

    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    calm_s: list[float] = field(default_factory=list)  # steps during which nothing was loaded
    busy_s: list[float] = field(default_factory=list)  # the others

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


@dataclass(slots=True)
class _Running:
    """A request under way. It holds its adapter, as requests do."""

    digest: bytes
    prompt: int
    adapter: Adapter | None
    found: list[object] = field(default_factory=list)
    is_cancelled: bool = False


class IdealLRU:
    """A cache of adapters that drops those used longest ago. Every use and every load of a content
    counts as its last use. `running` returns the digests of adapters that requests hold, which are
    not dropped; None: it drops them all the same, which no server can."""

    def __init__(
        self, max_bytes: int | None, running: Callable[[], Collection[bytes]] | None = None
    ) -> None:
        self._max_bytes, self._running = max_bytes, running
        self._held: dict[bytes, int] = {}  # the last used last
        self._lock = threading.Lock()

    def use(self, version: AdapterVersion) -> bool:
        """Adds the content. Returns True if it was in the cache already."""
        with self._lock:
            found = self._held.pop(version.digest, None) is not None
            self._held[version.digest] = version.num_bytes
            held = {version.digest, *(() if self._running is None else self._running())}
            for digest in [each for each in self._held if each not in held]:
                if self._max_bytes is None or sum(self._held.values()) <= self._max_bytes:
                    break
                del self._held[digest]
            return found

    def keep(self, versions: Iterable[AdapterVersion]) -> None:
        """Drops the contents that no name refers to any more."""
        digests = {version.digest for version in versions}
        with self._lock:
            self._held = {key: size for key, size in self._held.items() if key in digests}


class Chaos:
    """Runs a plan. `strike`: called before each request, may end ranks."""

    def __init__(
        self,
        engine: DrivenEngine,
        registry: AdapterRegistry,
        folders: Sequence[Path],
        prompts: Sequence[Sequence[int]],
        expected: Expected,
        plan: Plan,
        strike: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._engine, self._registry, self._folders = engine, registry, folders
        self._prompts, self._expected, self._plan, self._strike = prompts, expected, plan, strike
        self._rng, self.tally = random.Random(plan.seed), Tally()
        self._running: dict[str, _Running] = {}
        self._asked: set[tuple[bytes, int]] = set()  # prompts that this content has answered
        self._changes: queue.Queue[tuple[str, Path | None] | None] = queue.Queue()
        self._is_loading = False
        self._ideal = IdealLRU(registry.memory_bytes)
        self._careful = IdealLRU(registry.memory_bytes, self._held)

    def run(self) -> Tally:
        """Returns the tally once all requests have ended."""
        for number in range(self._plan.num_names):
            version = self._registry.load(f"n{number}", self._rng.choice(self._folders))
            self._ideal.use(version)
            self._careful.use(version)
        changer = threading.Thread(target=self._change, name="chaos of adapters", daemon=True)
        changer.start()
        for number in range(self._plan.num_requests):
            self._strike(number)
            self._ask_for_changes()
            self._send(number)
            while len(self._running) >= _MOST_RUNNING:
                self._step()
        while self._running:
            self._step()
        self._changes.put(None)
        changer.join(300.0)
        if changer.is_alive():
            self.tally.problems.append("a load does not end")
        self._engine.check_integrity()
        return self.tally

    def _held(self) -> set[bytes]:
        """Returns the digests of the adapters that running requests hold."""
        return {each.digest for each in list(self._running.values())}

    def _name(self) -> str:
        """Draws a name by Zipf's law."""
        weights = [1 / (rank + 1) for rank in range(self._plan.num_names)]
        return f"n{self._rng.choices(range(self._plan.num_names), weights)[0]}"

    def _ask_for_changes(self) -> None:
        draw = self._rng.random()
        if draw < self._plan.load_share:
            self._changes.put((self._name(), self._rng.choice(self._folders)))
        elif draw < self._plan.load_share + self._plan.unload_share:
            self._changes.put((self._name(), None))

    def _change(self) -> None:
        """Loads and unloads names. Refusals are expected: no room, no rank there at the moment."""
        while (change := self._changes.get()) is not None:
            name, folder = change
            self._is_loading = folder is not None
            try:
                if folder is None:
                    self._registry.unload(name)
                else:
                    version = self._registry.load(name, folder)
                    for cache in (self._ideal, self._careful):
                        cache.use(version)
                for cache in (self._ideal, self._careful):
                    cache.keep(self._registry.versions())
                self.tally.count("unloads" if folder is None else "loads")
            except (InvalidRequestError, ModelNotFoundError, CheckpointError):
                self.tally.count("refused changes")
            self._is_loading = False

    def _send(self, number: int) -> None:
        adapter = None
        if self._rng.random() >= self._plan.base_share:
            name = self._name()
            try:
                is_hit = self._registry.in_memory(name) is not None
                adapter = self._registry.acquire(name)
                self.tally.count("found in memory" if is_hit else "read again")
                if self._ideal.use(adapter.version):
                    self.tally.count("found by an ideal LRU")
                if self._careful.use(adapter.version):
                    self.tally.count("found by an LRU that keeps adapters of running requests")
            except (InvalidRequestError, ModelNotFoundError):  # no room; not loaded at the moment
                self.tally.count("refused requests")
                return
        digest = b"" if adapter is None else adapter.version.digest
        prompt = self._rng.randrange(len(self._prompts))
        self._running[f"r{number}"] = _Running(digest, prompt, adapter)
        self._engine.add(
            GenerationRequest(
                request_id=f"r{number}",
                prompt_token_ids=tuple(self._prompts[prompt]),
                params=PARAMS,
                adapter=adapter,
            )
        )
        if self._rng.random() < self._plan.cancel_share:
            self._step()
            cancelled = self._running.pop(f"r{number}", None)
            if cancelled is not None:
                self._engine.abort(f"r{number}")
                self.tally.count("cancelled")

    def _step(self) -> None:
        was_loading, clock = self._is_loading, time.perf_counter()
        deltas = self._engine.step()
        times = self.tally.busy_s if was_loading or self._is_loading else self.tally.calm_s
        times.append(time.perf_counter() - clock)
        for delta in deltas:
            if delta.request_id in self._running:  # else it was cancelled
                self._take(delta)

    def _take(self, delta: TokenDelta) -> None:
        running = self._running[delta.request_id]
        key = (running.digest, running.prompt)
        if delta.error is not None:
            self.tally.problems.append(f"{delta.request_id} failed: {delta.error}")
        if delta.num_cached_tokens and key not in self._asked:
            self.tally.problems.append(f"{delta.request_id} found pages of another content")
        running.found += _tokens_of(delta)
        self._asked.add(key)
        if delta.finish_reason is None:
            return
        del self._running[delta.request_id]
        self.tally.count("answers")
        if delta.num_cached_tokens:
            self.tally.count("answers with cached pages")
        if delta.error is None and tuple(running.found) != self._expected[key]:
            self.tally.problems.append(f"{delta.request_id} has the answer of another content")


def answers_of(
    engine: DrivenEngine, adapters: Sequence[Adapter | None], prompts: Sequence[Sequence[int]]
) -> dict[tuple[bytes, int], Answer]:
    """Returns the answer of each content to each prompt, one request at a time."""
    answers: dict[tuple[bytes, int], Answer] = {}
    for adapter in adapters:
        digest = b"" if adapter is None else adapter.version.digest
        for prompt, tokens in enumerate(prompts):
            found: list[object] = []
            request = GenerationRequest(
                request_id=f"{digest.hex()} {prompt}",
                prompt_token_ids=tuple(tokens),
                params=PARAMS,
                adapter=adapter,
            )
            engine.add(request)
            while engine.has_work:
                for delta in engine.step():
                    assert delta.error is None, delta
                    found += _tokens_of(delta)
            answers[digest, prompt] = tuple(found)
    return answers


def _tokens_of(delta: TokenDelta) -> list[object]:
    """Returns each token with its log probability: a step may give several."""
    return list(zip(delta.token_ids, delta.logprobs or [None] * len(delta.token_ids), strict=True))
