"""Reads and writes a placement as a JSON file.

    {"format": "moe-serve placement", "version": 1, "num_ranks": 2, "num_experts": 3,
     "layers": {"1": [[0], [0, 1], [1]], ...}}

`layers` maps the number of each layer with routed experts (its number in the model) to a list that
names, for each expert, the ranks that hold it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experts.placement.placement_error import NotAPlanError, PlacementError
from experts.placement.problem.placement import Placement, RanksOf

FORMAT, VERSION = "moe-serve placement", 1
_MOST_DIGITS = 19
_KEYS = {"format", "version", "num_ranks", "num_experts", "layers"}

_WRITER = (
    "`moe-serve place --out FILE` writes one, and with --current PLAN --max-moves 0 it turns a "
    "plan of SGLang, vLLM, TensorRT-LLM or vLLM-Ascend into one."
)


def read_placement(path: Path) -> Placement:
    """Reads a placement file, in which every expert of its layers is on a rank. Raises
    PlacementError, which names the file and the fault."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise PlacementError(
            f"{path} cannot be read: it is not a regular file. Pass the path of a JSON file."
        )
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlacementError(f"{path} cannot be read: {error.strerror}.") from None
    # includes PlacementError, whose message does not name the file yet
    except (ValueError, RecursionError) as error:
        reason = str(error).removesuffix(".")
        raise PlacementError(f"{path} is not a JSON placement: {reason}; {_WRITER}") from None
    try:
        return parse_placement(content)
    except NotAPlanError as error:
        reason = str(error).removesuffix(".")
        raise PlacementError(
            f"{path} is not a placement of moe-serve: {reason}; {_WRITER}"
        ) from None
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}") from None


def write_placement(placement: Placement, path: Path) -> None:
    """Writes a placement file; `placement_text` makes its content."""
    path.write_text(placement_text(placement), encoding="utf-8")


def placement_text(placement: Placement) -> str:
    """Returns the content of a placement file, with one line for each layer."""
    assert not placement.lost, f"{len(placement.lost)} experts are on no rank"
    layers = ",\n".join(
        f'  "{layer}": {json.dumps(experts)}'
        for layer, experts in sorted(placement.ranks_of.items())
    )
    head = json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "num_ranks": placement.num_ranks,
            "num_experts": placement.num_experts,
        }
    )
    return f'{head[:-1]}, "layers": {{\n{layers}\n}}}}\n'


def parse_placement(content: Any) -> Placement:
    """Makes a placement from the JSON content of a file. Raises PlacementError or NotAPlanError,
    which do not name the file."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise NotAPlanError(f'it does not contain "format": "{FORMAT}".')
    if content.get("version") != VERSION:
        raise PlacementError(f"version must be {VERSION}, got {content.get('version')!r}.")
    if content.keys() != _KEYS:
        missing, more = sorted(_KEYS - content.keys()), sorted(map(str, content.keys() - _KEYS))
        raise PlacementError(
            f"Keys are missing ({missing}) or unknown ({more}); a placement has exactly "
            f"{sorted(_KEYS)}."
        )
    if not isinstance(content["layers"], dict):
        raise PlacementError(
            "layers must be an object that maps layer numbers to lists of experts."
        )
    layers = {}
    for key, experts in content["layers"].items():
        if not _is_layer(key):
            raise PlacementError(
                f"The keys of layers must be layer numbers as text, got {str(key)[:20]!r}."
            )
        layers[int(key)] = _experts(key, experts)
    numbers = {key: content[key] for key in ("num_ranks", "num_experts")}
    for key, value in numbers.items():
        if not _is_number(value):
            raise PlacementError(f"{key} must be a whole number, got {value!r}.")
    placement = Placement(**numbers, ranks_of=layers)
    if not layers:
        raise PlacementError("layers is empty; it needs at least one layer.")
    if placement.lost:
        first = placement.lost[0]
        raise PlacementError(
            f"{len(placement.lost)} experts are on no rank; the first is expert {first.expert} of "
            f"layer {first.layer}. Give every expert at least one rank."
        )
    return placement


def _experts(layer: str, experts: Any) -> RanksOf:
    if not isinstance(experts, list):
        raise PlacementError(
            f"Layer {layer} must be a list with one entry for each expert, got {experts!r}."
        )
    for expert, ranks in enumerate(experts):
        if not isinstance(ranks, list) or not all(_is_number(rank) for rank in ranks):
            raise PlacementError(
                f"Layer {layer}, expert {expert}: ranks must be a list of rank numbers, got "
                f"{ranks!r}."
            )
    return tuple(map(tuple, experts))


def _is_layer(key: Any) -> bool:
    """Returns whether a key is a layer number. In YAML a key may have any type."""
    is_short = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10
    return is_short and key == str(int(key))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def parse_json(text: str) -> Any:
    """Parses JSON like `json.loads`, but refuses repeated keys and numbers too long for a
    placement. Raises ValueError or RecursionError.
    """
    return json.loads(text, object_pairs_hook=_without_repeats, parse_int=_whole_number)


def _whole_number(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise PlacementError(
            f"A number has {len(text)} digits; at most {_MOST_DIGITS} are allowed."
        )
    return int(text)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses repeated keys: json.loads would silently keep only the last layer of two with the
    same number."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise PlacementError(f"The key {repeated!r} occurs twice.")
    return content
