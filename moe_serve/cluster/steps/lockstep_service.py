"""Keeps the targets of service tiers over several engines that step together.

The time of a step depends on the rows of all attention ranks, as the expert ranks compute them
together. So steps are measured over all engines, and a budget of seconds is found for all of them
and shared out as prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moe_serve.engine.engine import Engine
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.step_service import StepService
from moe_serve.engine.service.service_state import ServiceState
from moe_serve.engine.service.step_budget import rows_of_decoding, shared_out
from moe_serve.engine.service.step_model import StepWork


class LockstepService:
    """The service of a cluster's engines, which share one `state`."""

    def __init__(self, state: ServiceState) -> None:
        self.state = state
        self._ended_at = 0.0

    def share_budget(self, engines: Iterable[Engine]) -> None:
        """Gives each engine its part of the prompt tokens that the next step may read."""
        services = [_service(engine) for engine in engines]
        queues = [service.queue for service in services]
        budget = next((queue.budget for queue in queues if queue.budget is not None), None)
        if budget is None:
            return
        decoding = [service.decoding for service in services]
        slacks = [queue.slack_s(own) for queue, own in zip(queues, decoding, strict=True)]
        rows = sum([rows_of_decoding(own) for own in decoding], StepWork())
        wanted = [service.num_prompt_tokens for service in services]
        slack_s = min([each for each in slacks if each is not None], default=None)
        total = budget.prompt_tokens(rows, slack_s, max(1, sum(wanted)))
        for queue, limit in zip(queues, shared_out(total, wanted, budget.page_size), strict=True):
            queue.prompt_limit = limit

    def choose(self, engines: Mapping[str, Engine], sequence: Sequence) -> Engine:
        """Returns the engine on which a sequence would get its first token earliest."""

        def predicted_s(engine: Engine) -> tuple[float, int]:
            return _service(engine).predicted_s(sequence), engine.num_pending_tokens

        return min(engines.values(), key=predicted_s)

    def move_waiting(self, engines: Iterable[Engine]) -> None:
        """Moves sequences that wait for a seat to ranks that have seats and no queue. They have no
        pages yet, so moving them costs nothing.
        """
        engines = list(engines)
        crowded = [e for e in engines if e.num_waiting and e.num_running >= e.num_seats]
        for engine in engines:
            num_free = engine.num_seats - engine.num_running
            if engine.num_waiting or num_free <= 0:
                continue
            for source in crowded:
                for sequence in _service(source).movable(num_free):
                    engine.adopt(source.moving.release(sequence))
                    num_free -= 1

    def step_ended(self, begun_at: float, *, has_work: bool) -> None:
        """Learns from a step of all engines that has ended."""
        now = self.state.clock()
        rows = self.state.take_rows()
        if rows is not None:
            self.state.observe(rows, now - max(begun_at, self._ended_at))
        self._ended_at = now
        self.state.turn(has_work=has_work)


def _service(engine: Engine) -> StepService:
    assert engine.service is not None, "the engines of a cluster share their service"
    return engine.service
