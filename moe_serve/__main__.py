"""Runs the `moe-serve` command as `python -m moe_serve`."""

from __future__ import annotations

import sys

try:
    from moe_serve.cli.main import main
except KeyboardInterrupt:  # while modules are still imported: an end like any other
    sys.exit(130)

if __name__ == "__main__":
    main()
