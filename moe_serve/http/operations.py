"""Properties of the process that the application runs in. Tests may leave them out."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_serve.config.sections import LogConfig
from moe_serve.engine.watch.hang_watch import HangWatch
from moe_serve.engine.watch.startup import Startup


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """The log configuration, the start's progress and the hang watch.

    `hangs` None: there is no hang watch, and /admin/hang does not exist.
    """

    log: LogConfig = field(default_factory=LogConfig)
    startup: Startup = field(default_factory=Startup)
    hangs: HangWatch | None = None
