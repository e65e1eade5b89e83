"""The HTTP side of a simulated server: requests reach the engine later, and tokens their client."""

from __future__ import annotations

from collections.abc import Iterable

from moe_serve.planning.calibration_file import HttpCosts

_NEVER = float("-inf")


class FrontEnd:
    """Delays what goes in and out of one server, as `moe-serve calibrate` measured it.

    The event loop begins requests one after another, and writes the chunks of a step one after
    another. The steps themselves are longer, too: that is in the costs (`with_step_loss`).
    """

    def __init__(self, costs: HttpCosts) -> None:
        self._costs, self._last_s = costs, _NEVER

    @property
    def begin_s(self) -> float:
        """What the engine loses for a request that begins."""
        return self._costs.begin_s

    def pass_request(self, at_s: float, num_prompt: int) -> float:
        """Returns when the engine has a request that its client sends at `at_s`. Requests must come
        in the order of their times."""
        alone_s = at_s + self._costs.request.seconds(num_prompt)
        self._last_s = max(alone_s, self._last_s + self._costs.begin_s)
        return self._last_s

    def pass_tokens(self, ends: Iterable[float], place: int, last_s: float) -> list[float]:
        """Returns when the tokens of steps that end at these times reach a client whose chunk is at
        a place among those of its step, none before `last_s`."""
        return [max(last_s, end_s + place * self._costs.chunk_s) for end_s in ends]
