"""Answers that forget the middle of their context have the same bits on ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_serve.engine.request.kv_window import KVWindow
from tests.support.cluster.layouts import colocated, config, on_ranks, requests


@pytest.mark.parametrize("attention", [1, 2])
def test_ranks_answer_as_one_process(attention: int) -> None:
    windows = [KVWindow(window=20), KVWindow(window=40, sinks=0), None]
    wanted = [
        replace(r, params=replace(r.params, kv_window=windows[index % 3]))
        for index, r in enumerate(requests(6, 4096, num_tokens=40))
    ]
    of = config(attention, 1)
    answers = on_ranks(of, wanted)
    assert answers == colocated(of, wanted)
    whole = [replace(r, params=replace(r.params, kv_window=None)) for r in wanted]
    assert answers != colocated(of, whole), "the windows had no effect"
