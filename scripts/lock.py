"""Compares or writes deploy/requirements.lock: the versions of all packages that the server needs.

    python scripts/lock.py             compare with the installed packages
    python scripts/lock.py --write     write the file from the installed packages

The file lists the dependencies of moe-serve with the extras `gpu`, `otel`, `events` and
`encryption`, and their dependencies, as the installed packages state them. The build of torch
(`+cpu`) is left out, so that one file serves CPUs and GPUs; torch itself pins the packages of a
CUDA build.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

LOCK = Path(__file__).resolve().parents[1] / "deploy" / "requirements.lock"
PACKAGE, EXTRAS = "moe-serve", ("gpu", "otel", "events", "encryption")
_HEAD = """\
# Versions of all packages that moe-serve needs to run, for Python {python} and newer:
#
#     pip install moe-serve -c deploy/requirements.lock
#
# The test suite passed with these versions. Written by scripts/lock.py. The build of torch (CPU or
# CUDA) is the one that was installed before, or the one that pip chooses.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Pin what the server needs to run.")
    parser.add_argument("--write", action="store_true", help=f"write {LOCK.name}")
    arguments = parser.parse_args()
    text = lock_text()
    if arguments.write:
        LOCK.write_text(text, encoding="utf-8")
        return 0
    if LOCK.read_text("utf-8") == text:
        return 0
    print(f"{LOCK} is not what is installed here: python scripts/lock.py --write")
    return 1


def lock_text() -> str:
    found = closure(PACKAGE, EXTRAS)
    needed = [SpecifierSet(one.metadata["Requires-Python"] or "") for one in found.values()]
    python = next(
        minor
        for minor in range(10, 100)
        if all(f"3.{minor}.99" in specifiers for specifiers in needed)
    )
    pins = [f"{name}=={Version(one.version).public}" for name, one in sorted(found.items())]
    return _HEAD.format(python=f"3.{python}") + "\n".join(pins) + "\n"


def closure(package: str, extras: tuple[str, ...]) -> dict[str, Distribution]:
    """Returns the installed packages that `package` needs, by canonical name, without itself."""
    found: dict[str, Distribution] = {}
    waiting, seen = [(package, frozenset(extras))], set[tuple[str, frozenset[str]]]()
    while waiting:
        entry = waiting.pop()
        if entry in seen:
            continue
        seen.add(entry)
        name, wanted = entry
        try:
            one = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"{name} is not installed: install .[test] first") from None
        if name != package:
            found[name] = one
        for requirement in map(Requirement, one.requires or ()):
            if is_needed(requirement, wanted):
                other = canonicalize_name(requirement.name)
                waiting.append((other, frozenset(requirement.extras)))
    return found


def is_needed(requirement: Requirement, extras: frozenset[str]) -> bool:
    """Returns whether the requirement applies on this machine, with these extras of its package."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


if __name__ == "__main__":
    sys.exit(main())
