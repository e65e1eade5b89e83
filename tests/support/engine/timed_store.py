"""A page store and a runner on one clock, which moves as they read and compute."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_serve.cache.tiers.store import LoadDone, LoadedPages, LoadProgress
from moe_serve.model.step_plan import StepPlan
from tests.support.engine.fake_runner import FakeRunner
from tests.support.engine.fake_store import FakeStore


class SetClock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TimedStore(FakeStore):
    """Reads one page after the other, `page_s` seconds each."""

    def __init__(self, clock: SetClock, page_s: float) -> None:
        super().__init__()
        self.clock, self.page_s, self._free_at = clock, page_s, 0.0
        self._jobs: dict[int, tuple[float, list[bytes]]] = {}  # begin, keys

    def load(self, job: int, keys: Sequence[bytes]) -> None:
        self.loads.append(list(keys))
        begin = max(self.clock.now, self._free_at)
        self._free_at = begin + len(keys) * self.page_s
        self._jobs[job] = begin, list(keys)

    def progress(self, job: int) -> LoadProgress | None:
        begin, _ = self._jobs[job]
        return LoadProgress(len(self._read(job)), max(0.0, self.clock.now - begin))

    def read_pages(self, job: int, start: int) -> LoadedPages:
        return self._read(job)[start:]

    def cancel(self, job: int) -> LoadedPages:
        (begin, _), pages = self._jobs[job], self._read(job)
        self._free_at = self.clock.now
        self._jobs[job] = begin, self._jobs[job][1][: len(pages)]
        return pages

    def take_done(self) -> list[LoadDone]:
        ended = [job for job, (_, keys) in self._jobs.items() if len(self._read(job)) == len(keys)]
        done = [LoadDone(job, self._read(job), len(self._jobs[job][1]), self._seconds(job))
                for job in ended]  # fmt: skip
        for job in ended:
            del self._jobs[job]
        return done

    def wait(self, seconds: float) -> None:
        self.clock.now += min(seconds, self.page_s)

    def _read(self, job: int) -> LoadedPages:
        begin, keys = self._jobs[job]
        count = int((self.clock.now - begin) / self.page_s + 1e-6)
        return tuple(self.pages[key].copy() for key in keys[: max(0, count)])

    def _seconds(self, job: int) -> float:
        return max(1, len(self._jobs[job][1])) * self.page_s


class TimedRunner(FakeRunner):
    """Takes `token_s` seconds for a token."""

    def __init__(self, page_size: int, clock: SetClock, token_s: float) -> None:
        super().__init__(page_size)
        self.clock, self.token_s = clock, token_s

    def run(self, plan: StepPlan) -> Tensor:
        self.clock.now += self.token_s * sum(len(piece.token_ids) for piece in plan.slices)
        return super().run(plan)
