"""Runs Python code in a copy of the template: `python -m tests.support.forks.code CODE ARGUMENTS`.

It is like `python -c`, without the imports of torch and of the server, which the copy has.
"""

from __future__ import annotations

import sys


def main() -> None:
    code = sys.argv.pop(1)
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
