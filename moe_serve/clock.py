"""The clock by which the engine decides. A part that decides by time is given one and reads no
other, so a test or a simulation can supply its own seconds.

Code that only measures durations for reports may read the `time` module itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]  # returns seconds since any moment; they never decrease

REAL_CLOCK: Clock = time.monotonic
