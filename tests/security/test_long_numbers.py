"""Numbers of thousands of digits in files, which Python refuses to convert."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experts.placement.formats.engine_plan import PlanFacts
from experts.placement.placement_error import PlacementError
from experts.placement.plan_file import read_placement
from moe_serve.cli.place import place_inputs
from moe_serve.cli.run_batch.batch_output import BatchRow, read_line
from moe_serve.cli.trace.trace_record import read_prompts
from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.sampling.grammar.source_check import check_source
from moe_serve.errors import CheckpointError, InvalidGrammarError, MoeServeError
from moe_serve.model.checkpoint.checkpoint import Checkpoint, demo_model_folder
from moe_serve.model.checkpoint.hf_config import HFConfig, generation_eos_token_ids
from moe_serve.model.checkpoint.safetensors_file import SafetensorsFile
from moe_serve.planning.calibration_file import read_calibration
from moe_serve.text.tokenizer import read_json_file
from routing_predictor.importers.importer import import_files
from routing_predictor.importers.tables import ImportOptions
from routing_predictor.traces.card import read_card
from routing_predictor.traces.routing_error import RoutingError

DIGITS = pytest.mark.parametrize("digits", [4000, 5000])


def header_file(path: Path, shape: str) -> Path:
    header = f'{{"w": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 4]}}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"0000")
    return path


@pytest.mark.parametrize(
    "shape",
    [
        f"[{'9' * 4000}, {'9' * 4000}]",
        f"[{'9' * 5000}]",
        f"[{'9' * 90}, {'9' * 90}]",
        f"[{', '.join(['9223372036854775807'] * 5000)}]",
    ],
)
def test_shapes_of_tensors(tmp_path: Path, shape: str) -> None:
    with pytest.raises(CheckpointError, match="is not a whole safetensors file") as caught:
        SafetensorsFile(header_file(tmp_path / "model.safetensors", shape))
    assert len(str(caught.value)) < 600 and "set_int_max" not in str(caught.value)


@DIGITS
def test_files_of_a_checkpoint(tmp_path: Path, digits: int) -> None:
    folder = Path(shutil.copytree(demo_model_folder(), tmp_path / "model"))
    values = json.loads((folder / "config.json").read_text("utf-8"))
    text = json.dumps(values | {"hidden_size": "N", "eos_token_id": "N"})
    number = "9" * digits
    for name, read in (
        ("config.json", HFConfig.read),
        ("generation_config.json", generation_eos_token_ids),
        ("tokenizer_config.json", lambda path: read_json_file(path / "tokenizer_config.json")),
    ):
        (folder / name).write_text(text.replace('"N"', number), "utf-8")
        with pytest.raises(CheckpointError, match=rf"{name} .*it has a number of {digits} digits"):
            read(folder)
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"w": {number}}}}}')
    with pytest.raises(CheckpointError, match=rf"it has a number of {digits} digits"):
        Checkpoint(folder)


def test_a_number_of_31_digits_is_read(tmp_path: Path) -> None:
    """Many published tokenizers have such a `model_max_length`."""
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert read_json_file(path) == {"model_max_length": 1000000000000000019884624838656}


PLACEMENT = (
    '{"format": "moe-serve placement", "version": 1, "num_ranks": N, "num_experts": N, '
    '"layers": {"1": [[0], [N]]}}'
)
PLAN = PlanFacts(num_devices=2, num_experts=4)
READERS: tuple[tuple[str, str, Callable[[Path], Any]], ...] = (
    ("placement.json", PLACEMENT, read_placement),
    ("plan.json", '{"physical_to_logical_map": [[N]]}', lambda p: place_inputs.read_plan(p, PLAN)),
    (
        "plan.yaml",
        "num_slots: N\ninitial_global_assignments:\n  N: [N]\n",
        lambda path: place_inputs.read_plan(path, PLAN),
    ),
    ("calibration.json", '{"schema": N}', read_calibration),
    ("card.json", '{"version": N}', read_card),
    (
        "loads.json",
        '{"snapshots": [N]}',
        lambda path: import_files([path], "auto", ImportOptions()),
    ),
    ("prompts.jsonl", '{"prompt": [N]}', read_prompts),
)


@DIGITS
@pytest.mark.parametrize("name", [name for name, _, _ in READERS])
def test_other_files(tmp_path: Path, name: str, digits: int) -> None:
    _, text, read = next(entry for entry in READERS if entry[0] == name)
    path = tmp_path / name
    path.write_text(text.replace("N", "9" * digits))
    with pytest.raises((MoeServeError, PlacementError, RoutingError)) as caught:
        read(path)
    assert path.name in str(caught.value) and len(str(caught.value)) < 600
    assert "set_int_max" not in str(caught.value)


def test_lines_of_a_batch_and_schemas() -> None:
    row = read_line(1, b'{"custom_id": ' + b"9" * 5000 + b"}")
    assert isinstance(row, BatchRow) and b"a number of 5000 digits" in row.to_json()
    schema = f'{{"type": "integer", "maximum": {"9" * 5000}}}'
    with pytest.raises(InvalidGrammarError, match="it has a number of 5000 digits"):
        check_source(Constraint(kind="json_schema", source=schema))
