"""`python -m moe_serve` is `moe-serve`."""

from __future__ import annotations

from moe_serve.cli.main import main

if __name__ == "__main__":
    main()
