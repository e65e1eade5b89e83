"""Random requests, steps, parcels, losses, aborts and drains of two or three small cells.

After every event the books of all cells agree, and every answer so far is that of one engine alone.
In the end each request has ended once, and no page is held.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moe_serve.cluster.cells.rates import TokenSteps
from moe_serve.config.cells import CellsConfig
from moe_serve.engine.request.kv_window import KVWindow
from moe_serve.engine.service.step_model import FittedSteps
from tests.support.cluster.fake_cells import POISON, CellsWorld, Limits, prompt

LAYOUTS = (
    "1x(1A1E prefill) 1x(1A1E decode)",
    "2x(1A1E)",
    "1x(2A1E prefill) 1x(1A1E decode)",
    "1x(1A1E prefill) 1x(1A1E decode) 1x(1A1E)",
)
_MOST_REQUESTS = 12


class RandomCells(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(LAYOUTS),
        hand_over=st.sampled_from(["auto", "always"]),
        limits=st.builds(
            Limits,
            num_pages=st.integers(10, 26),
            num_seats=st.integers(1, 4),
            budget=st.sampled_from([8, 20, 64]),
            is_ahead=st.booleans(),
        ),
        pages_per_parcel=st.integers(1, 3),
        room=st.integers(1, 6),
        make_model=st.sampled_from([FittedSteps, TokenSteps]),
    )
    def start(self, layout, hand_over, limits, pages_per_parcel, room, make_model) -> None:  # type: ignore[no-untyped-def]
        self.world = CellsWorld(
            layout=layout,
            config=CellsConfig(hand_over=hand_over, min_tokens=16),
            limits=limits,
            pages_per_parcel=pages_per_parcel,
            room=max(room, pages_per_parcel),
            make_model=make_model,
            timeout_s=2.0,
        )

    @precondition(lambda self: len(self.world.requests) < _MOST_REQUESTS)
    @rule(
        stem=st.integers(0, 2),
        length=st.integers(1, 110),
        own=st.integers(0, 40),
        max_tokens=st.integers(1, 40),
        num_logprobs=st.sampled_from([None, None, 1]),
        window=st.sampled_from([None, None, None, KVWindow(window=16, sinks=4)]),
        is_bad=st.sampled_from([False] * 7 + [True]),
    )
    def add(  # type: ignore[no-untyped-def]
        self, stem, length, own, max_tokens, num_logprobs, window, is_bad
    ) -> None:
        name = f"r{len(self.world.requests)}"
        tokens = [*prompt(length, stem), *prompt(own, 10 + len(self.world.requests))]
        if is_bad:
            tokens[-1] = POISON
        self.world.add(
            name,
            tokens,
            max_tokens=min(max_tokens, 160 - len(tokens)),
            prompt_logprobs=num_logprobs,
            kv_window=window,
        )

    @rule(which=st.integers(0, 2), count=st.integers(1, 4))
    def step(self, which: int, count: int) -> None:
        index = which % len(self.world.cells)
        for _ in range(count):
            if self.world.cells[index].is_out:
                self.world.end(index)
            else:
                self.world.begin(index)

    @rule(count=st.integers(1, 3))
    def turn(self, count: int) -> None:
        for _ in range(count):
            self.world.turn(delivers=False)

    @precondition(lambda self: self.world.carrier.on_way)
    @rule(which=st.integers(0, 9), is_bad=st.sampled_from([False, False, False, True]))
    def deliver(self, which: int, is_bad: bool) -> None:
        carrier = self.world.carrier
        carrier.deliver(which % len(carrier.on_way), "bad luck" if is_bad else "")

    @rule()
    def take(self) -> None:
        self.world.moves.turn()

    @precondition(lambda self: self.world.requests)
    @rule(which=st.integers(0, _MOST_REQUESTS))
    def abort(self, which: int) -> None:
        names = list(self.world.requests)
        self.world.abort(names[which % len(names)])

    @rule(which=st.integers(0, 3), is_back=st.booleans())
    def lose(self, which: int, is_back: bool) -> None:
        places = [(c.index, name) for c in self.world.cells for name in c.coordinator.names]
        index, rank = places[which % len(places)]
        if rank not in self.world.cells[index].coordinator.away:
            self.world.lose(index, rank, is_back=is_back)

    @rule()
    def come_back(self) -> None:
        self.world.come_back()

    @rule(which=st.integers(0, 2), is_draining=st.booleans())
    def drain(self, which: int, is_draining: bool) -> None:
        self.world.cells[which % len(self.world.cells)].is_draining = is_draining

    @rule(seconds=st.sampled_from([0.3, 1.1, 2.5]))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.come_back()
            for cell in self.world.cells:
                cell.is_draining = False
            self.world.run(most=1500)


RandomCells.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestRandomCells = RandomCells.TestCase
