"""Runs `moe_serve` with a closed standard output, as `moe-serve ... >&-` does, in a copy of the
template process."""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    os.close(1)
    sys.stdout = sys.__stdout__ = None  # type: ignore[assignment,misc]  # as the interpreter has it
    runpy.run_module("moe_serve", run_name="__main__", alter_sys=True)
