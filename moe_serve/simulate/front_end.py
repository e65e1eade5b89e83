"""The HTTP side of a simulated server: requests reach the engine later, and tokens their client."""

from __future__ import annotations

from collections.abc import Iterable

from moe_serve.planning.calibration_file import HttpCosts

_NEVER = float("-inf")


class FrontEnd:
    """Delays the requests and the tokens of one server by the times of a calibration.

    The event loop begins requests one after another, and writes the chunks of a step one after
    another. HTTP also makes the steps longer; `with_step_loss` adds that to the costs of a step.
    """

    def __init__(self, costs: HttpCosts) -> None:
        self._costs, self._last_s = costs, _NEVER

    @property
    def begin_s(self) -> float:
        """Seconds that the engine loses when a request begins."""
        return self._costs.begin_s

    def pass_request(self, at_s: float, num_prompt: int) -> float:
        """Returns the time at which the engine has a request that its client sends at `at_s`. Call
        it in the order of these times."""
        alone_s = at_s + self._costs.request.seconds(num_prompt)
        self._last_s = max(alone_s, self._last_s + self._costs.begin_s)
        return self._last_s

    def pass_tokens(self, ends: Iterable[float], place: int, last_s: float) -> list[float]:
        """Returns the times at which a client gets the tokens of the steps that end at `ends`. Its
        chunk is written after `place` others; no time is before `last_s`."""
        return [max(last_s, end_s + place * self._costs.chunk_s) for end_s in ends]
