"""The cases of every family that are held against transformers."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.support.families.case import Case

CASES: dict[str, Case] = {
    name: case
    for path in sorted((Path(__file__).parent / "cases").glob("[a-z]*.py"))
    for name, case in importlib.import_module(
        f"tests.support.families.cases.{path.stem}"
    ).CASES.items()
}
