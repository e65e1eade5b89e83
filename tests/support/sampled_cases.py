"""Runs a sample of a test's parametrised cases, unless every case is asked for.

A test marked `sampled` runs cases that together have every value of every parameter; with
`sampled(pairs=True)`, every pair of values of two parameters. The sample is the same in every run.
`make test-all` sets MOE_TESTS=all, and then every case runs.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import pytest

EVERY_CASE = os.environ.get("MOE_TESTS") == "all"


def drop_unsampled(items: list[pytest.Item], config: pytest.Config) -> None:
    """Removes the cases that are not in the sample of their test."""
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    dropped: set[pytest.Item] = set()
    for test, group in cases.items():
        marker = group[0].get_closest_marker("sampled")
        assert marker is not None, "it was just looked up"
        values = [values_of(item) for item in group]
        start = zlib.crc32(test.encode())  # tests of the same parameters run different cases
        kept = sample(values, pairs=marker.kwargs.get("pairs", False), start=start)
        dropped |= {item for index, item in enumerate(group) if index not in kept}
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]


def values_of(item: pytest.Function) -> dict[str, Hashable]:
    """Returns the value of each parameter of a case. Names that are parametrised together are one
    parameter, and so is a fixture with `params`."""
    named = [
        [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        for names in (marker.args[0] for marker in item.iter_markers("parametrize"))
    ]
    params = item.callspec.params
    named += [[name] for name in params if not any(name in names for names in named)]
    return {",".join(names): tuple(repr(params[name]) for name in names) for names in named}


def sample(
    cases: Sequence[Mapping[str, Hashable]], *, pairs: bool = False, start: int = 0
) -> set[int]:
    """Chooses cases that together have every value of every parameter, or every pair.

    Each time it takes the case with most of the missing values; of equal ones, the one with the
    values that are rarest so far, and of those the first from `start` on.
    """
    features = [
        {*case.items()} if not pairs else {*combinations(sorted(case.items(), key=str), 2)}
        for case in cases
    ]
    order = [(start + index) % len(cases) for index in range(len(cases))]
    missing, used, kept = set[object]().union(*features), Counter[object](), set[int]()
    while missing:
        best = max(
            order,
            key=lambda i: (len(features[i] & missing), -sum(used[v] for v in cases[i].items())),
        )
        kept.add(best)
        missing -= features[best]
        used.update(cases[best].items())
    return kept
