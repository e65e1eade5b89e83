"""The same tokens by either layout of frames, by either link, and through staged frames.

The masked layout and staging are for GPUs; here they are put in by hand, on the CPU's links.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from moe_serve.cluster.control import epoch
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.pipeline.exchange.frame_layout import CompactLayout, FrameLayout, MaskedLayout
from moe_serve.pipeline.links.data_group import DataGroup
from tests.support.cluster.layouts import (
    colocated,
    config,
    on_ranks,
    random_placement,
    requests,
)
from tests.support.pipeline.gloo_as_nccl import put_gloo

VOCAB_SIZE, NUM_LAYERS, NUM_EXPERTS = 4096, 6, 32  # of the demonstration model
WANTED = requests(6, VOCAB_SIZE, num_tokens=3)
FRAMES: dict[str, Callable[..., FrameLayout]] = {
    "compact": CompactLayout,
    "staged": partial(CompactLayout, is_staged=True),
    "masked": MaskedLayout,
}


def _put(monkeypatch: pytest.MonkeyPatch, frames: str, is_sharing: bool) -> None:
    monkeypatch.setattr(epoch, "CompactLayout", FRAMES[frames])
    monkeypatch.setattr(epoch, "DataGroup", partial(DataGroup, is_sharing=is_sharing))


def _check(of: EngineConfig, wanted: list[GenerationRequest] = WANTED) -> None:
    assert on_ranks(of, wanted) == colocated(of, wanted)


@pytest.mark.sampled
@pytest.mark.parametrize("is_sharing", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize(
    ("attention", "experts", "micro_batches"), [(1, 1, 1), (1, 1, 2), (2, 3, 1), (2, 3, 3)]
)
@pytest.mark.parametrize("frames", list(FRAMES))
def test_frames(
    monkeypatch: pytest.MonkeyPatch,
    frames: str,
    attention: int,
    experts: int,
    micro_batches: int,
    is_sharing: bool,
) -> None:
    _put(monkeypatch, frames, is_sharing)
    _check(config(attention, experts, micro_batches))


@pytest.mark.parametrize(
    ("attention", "experts", "micro_batches"), [(1, 1, 2), (2, 3, 3), (3, 2, 2)]
)
def test_in_the_order_of_nccl(
    monkeypatch: pytest.MonkeyPatch, attention: int, experts: int, micro_batches: int
) -> None:
    """As on GPUs, with gloo in NCCL's place: no tags, and a communicator for each direction."""
    put_gloo(monkeypatch)
    _check(config(attention, experts, micro_batches))


@pytest.mark.sampled
@pytest.mark.parametrize("router", ["attention", "experts"])
@pytest.mark.parametrize("frames", list(FRAMES))
def test_replicas_by_gloo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, frames: str, router: str
) -> None:
    """Steps of odd sizes, some of one row: some ranks get no rows of a micro-batch."""
    _put(monkeypatch, frames, is_sharing=False)
    file = random_placement(tmp_path / "plan.json", range(NUM_LAYERS), NUM_EXPERTS, 3, seed=7)
    _check(config(2, 3, 3, budget=7, placement=str(file), router=router), WANTED[:4])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("frames", list(FRAMES))
def test_dtypes_by_gloo(monkeypatch: pytest.MonkeyPatch, frames: str, dtype: str) -> None:
    _put(monkeypatch, frames, is_sharing=False)
    wanted = WANTED[:3]
    _check(config(1, 2, 2, dtype=dtype, budget=33), wanted)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("frames", "attention", "experts", "micro_batches"),
    [("compact", 1, 1, 1), ("compact", 2, 3, 2), ("staged", 2, 3, 1), ("masked", 2, 3, 2)],
)
@pytest.mark.parametrize("wire_dtype", ["bf16", "fp8"])
def test_rounded_rows_are_the_same_in_every_layout(
    monkeypatch: pytest.MonkeyPatch,
    wire_dtype: str,
    frames: str,
    attention: int,
    experts: int,
    micro_batches: int,
) -> None:
    wanted = WANTED[:3]
    expected = colocated(config(1, 1, 1, dtype="float32"), wanted, wire_dtype)
    assert expected != colocated(config(1, 1, 1, dtype="float32"), wanted), "it rounds nothing"
    _put(monkeypatch, frames, is_sharing=frames == "compact")
    of = config(
        attention, experts, micro_batches,
        dtype="float32", wire_dtype=wire_dtype, router="attention",
    )  # fmt: skip
    assert on_ranks(of, wanted) == expected


def test_rounded_rows_for_routers_on_the_expert_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They choose by the rows as they came: the same in every layout with such routers."""
    answers = []
    for frames, attention, experts in (("compact", 1, 1), ("masked", 2, 3), ("staged", 1, 2)):
        _put(monkeypatch, frames, is_sharing=True)
        of = config(attention, experts, 2, dtype="float32", wire_dtype="fp8", router="experts")
        answers.append(on_ranks(of, WANTED[:3]))
    assert answers[0] == answers[1] == answers[2]
