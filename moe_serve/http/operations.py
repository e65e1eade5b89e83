"""What the application is given of the process that it runs in; a test may leave it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_serve.config.sections import LogConfig
from moe_serve.engine.watch.hang_watch import HangWatch
from moe_serve.engine.watch.startup import Startup


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """`hangs` None: nobody watches, and /admin/hang is not there."""

    log: LogConfig = field(default_factory=LogConfig)
    startup: Startup = field(default_factory=Startup)
    hangs: HangWatch | None = None
