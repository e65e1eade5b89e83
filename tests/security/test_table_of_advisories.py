"""docs/operate/security.md names a test for every advisory, and each of these tests exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_test_that_the_table_names_exists() -> None:
    named = NAMED.findall((ROOT / "docs" / "operate" / "security.md").read_text("utf-8"))
    assert len(named) > 50
    missing = [
        f"{path}::{name}"
        for path, name in named
        if f"def {name}(" not in (ROOT / path).read_text("utf-8")
    ]
    assert missing == []


def test_every_advisory_that_a_test_names_is_in_the_table() -> None:
    """A row shortens ids after the first one of a year, so the number alone is searched."""
    table = (ROOT / "docs" / "operate" / "security.md").read_text("utf-8")
    ids = {
        found
        for path in (ROOT / "tests" / "security").glob("test_*.py")
        for found in re.findall(r"(?:CVE|PYSEC)-\d{4}-\d+", path.read_text("utf-8"))
    }
    assert sorted(one for one in ids if f"-{one.rsplit('-', 1)[1]}" not in table) == []
