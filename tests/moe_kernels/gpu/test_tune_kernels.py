"""The search for tiles, without a GPU: the candidates, the choice, and the written file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import tune_kernels
from moe_kernels.gpu.expert_layers import EXPERT_LAYERS, ExpertLayerSizes
from moe_kernels.gpu.grouped_gemm.api import known_capability
from moe_kernels.gpu.grouped_gemm.heuristics import BLOCK_MS, ProductShape, choose_tile
from moe_kernels.gpu.tuned import FOLDER, TunedTable, load_tuned, slug, tuned_tile, tuning_key
from tune_kernels import candidates, fits, overrides, products, tune_layer

LAYER = EXPERT_LAYERS[0]
SHAPE = ProductShape(num_inputs=2048, num_outputs=768, is_gated=True)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("block_m", BLOCK_MS)
def test_candidates_leave_what_decides_a_rows_bits(block_m: int, capability: int) -> None:
    found = list(candidates(SHAPE, block_m, capability))
    chosen = choose_tile(block_m, SHAPE, capability)
    assert found[0] == chosen and len(found) == len(set(found)) > 5
    for tile in found:
        same = (tile.block_m, tile.block_c) == (chosen.block_m, chosen.block_c)
        assert same, f"{tile} changes the order of sums of {chosen}"
        assert not tile.uses_tma or capability >= 90, f"sm_{capability} has no TMA"


def test_a_tile_that_does_not_fit_is_not_tried() -> None:
    chosen = choose_tile(64, SHAPE, 80)
    big = {"block_n": 256, "num_warps": 4, "num_stages": 5}
    tile = type(chosen)(**{**{f: getattr(chosen, f) for f in chosen.__slots__}, **big})
    assert not fits(tile, SHAPE, 80)


def test_the_fastest_tile_is_kept_where_it_gains_enough() -> None:
    """On this device only tiles of the first product with 2 stages are faster, by half."""
    first = products(LAYER)[0]

    def measure(
        layer: ExpertLayerSizes, block_m: int, entries: Mapping[str, Mapping[str, int]]
    ) -> float | None:
        entry = entries.get(first.key, {})
        if entry.get("num_warps"):
            return None  # does not compile
        return 1.0 if block_m == first.block_m and entry.get("num_stages") == 2 else 1.5

    told: list[str] = []
    entries = tune_layer(LAYER, 90, measure, told.append)
    assert set(entries) == {first.key} and entries[first.key]["num_stages"] == 2, entries
    assert len(told) == len(products(LAYER)), "one line per product"


def test_a_table_overrides_the_heuristics(tmp_path: Path) -> None:
    chosen = choose_tile(16, SHAPE, 90)
    stages = chosen.num_stages + 1
    key = tuning_key(SHAPE, 16)
    table = TunedTable(device="NVIDIA H200", triton="3.7", entries={key: {"num_stages": stages}})
    path = table.write(tmp_path)
    assert path.name == "nvidia-h200.json" and slug("NVIDIA H200") == "nvidia-h200"
    loaded = load_tuned("NVIDIA H200", "3.7.1", tmp_path)
    assert loaded == table
    tuned = tuned_tile(16, SHAPE, 90, loaded)
    assert tuned.num_stages == stages and overrides(tuned, chosen) == {"num_stages": stages}
    assert tuned_tile(64, SHAPE, 90, loaded) == choose_tile(64, SHAPE, 90), "nothing was tuned"


def test_a_table_of_another_triton_or_device_is_left_alone(tmp_path: Path) -> None:
    TunedTable(device="NVIDIA H200", triton="3.6", entries={"x": {"y": 1}}).write(tmp_path)
    assert not load_tuned("NVIDIA H200", "3.7.1", tmp_path).entries
    assert not load_tuned("NVIDIA A100", "3.6.0", tmp_path).entries


def test_a_table_cannot_change_what_decides_a_rows_bits() -> None:
    table = TunedTable(device="x", entries={tuning_key(SHAPE, 16): {"block_c": 32}})
    with pytest.raises(AssertionError, match="block_c"):
        tuned_tile(16, SHAPE, 90, table)


def test_a_chip_between_two_is_served_as_the_older_one() -> None:
    assert [known_capability(number) for number in (80, 86, 89, 90, 100, 120)] == [
        80, 80, 80, 90, 100, 100
    ]  # fmt: skip


def test_shipped_tables_are_sound() -> None:
    for path in FOLDER.glob("*.json"):
        table = TunedTable(**json.loads(path.read_text("utf-8")))
        assert slug(table.device) == path.stem, f"{path.name} is of {table.device}"


def test_dry_run_lists_candidates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune_kernels.py", "--dry-run", "--layers", "olmoe", "--capability", "80"]
    monkeypatch.setattr(sys, "argv", command)
    assert tune_kernels.main() == 0
    shown = capsys.readouterr().out
    assert "olmoe" in shown and "mixtral" not in shown and "tiles on sm_80" in shown
