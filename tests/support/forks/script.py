"""Runs a Python file in a copy of the template: `python -m tests.support.forks.script FILE ...`.

It is like `python FILE ...`, without the imports of torch and of the server, which the copy has.
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
