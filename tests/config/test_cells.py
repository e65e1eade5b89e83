"""The layout of cells: accepted values and error messages."""

from __future__ import annotations

import pytest

from moe_serve.config.cell_config import cell_shapes, config_of_cell
from moe_serve.config.cells import CellsConfig, CellShape, parse_cells
from moe_serve.config.sections import EngineConfig
from moe_serve.errors import ConfigError


def test_a_layout_names_every_cell_with_its_ranks_and_role() -> None:
    shapes = parse_cells(" 1x(1A1E prefill)  2x(1A2E tp2 DECODE)(3A4E)")
    decode = CellShape(attention_ranks=1, expert_ranks=2, attention_tp=2, role="decode")
    assert shapes == (
        CellShape(attention_ranks=1, expert_ranks=1, role="prefill"),
        decode,
        decode,
        CellShape(attention_ranks=3, expert_ranks=4),
    )
    assert [str(shape) for shape in shapes[1:]] == ["(1A2E tp2 decode)"] * 2 + ["(3A4E both)"]
    assert decode.num_processes == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "cannot be empty"),
        ("1A1E", "it takes groups such as"),
        ("0x(1A1E)", "it takes groups such as"),
        ("(1A1E prefil)", "it takes groups such as"),
        ("1x(1A1E) and more", "it takes groups such as"),
        ("65x(1A1E)", "has 65 cells: use at most 64"),
        ("64x(9999A1E)", "has 640000 processes in all: use at most 8192"),
        ("2x(1A1E prefill)", "none with the role decode or both"),
        ("(1A1E decode)", "none with the role prefill or both"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_what_to_write(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match="cells.layout") as error:
        parse_cells(text)
    assert told in str(error.value)


def test_only_prefill_cells_are_nice() -> None:
    of = EngineConfig(cells=CellsConfig(layout="1x(1A1E prefill) 1x(1A1E)", prefill_nice=7))
    shapes = enumerate(cell_shapes(of))
    assert [config_of_cell(of, i, shape).cells.prefill_nice for i, shape in shapes] == [7, 0]
