"""A placement as a JSON file.

    {"format": "moe-serve placement", "version": 1, "num_ranks": 2, "num_experts": 3,
     "layers": {"1": [[0], [0, 1], [1]], ...}}

`layers` names the model's layers that have routed experts, by their number in the model; of each
expert the ranks that hold it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experts.placement.errors import NotAPlanError, PlacementError
from experts.placement.problem.plan import Placement, RanksOf

FORMAT, VERSION = "moe-serve placement", 1
_MOST_DIGITS = 19
_KEYS = {"format", "version", "num_ranks", "num_experts", "layers"}

_WRITER = (
    "`moe-serve place --out FILE` writes one, and with --current PLAN --max-moves 0 it turns a "
    "plan of SGLang, vLLM, TensorRT-LLM or vLLM-Ascend into one."
)


def read_placement(path: Path) -> Placement:
    """Raises PlacementError with what is wrong; every expert of a file's layers is on a rank."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise PlacementError(f"{path} cannot be read: it is not a regular file.")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlacementError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # PlacementError too: the file is not named yet
        reason = str(error).removesuffix(".")
        raise PlacementError(f"{path} is not a JSON placement: {reason}; {_WRITER}") from None
    try:
        return parse_placement(content)
    except NotAPlanError as error:
        reason = str(error).removesuffix(".")
        raise PlacementError(f"{path} is no placement of moe-serve: {reason}; {_WRITER}") from None
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}") from None


def write_placement(placement: Placement, path: Path) -> None:
    """See `placement_text`."""
    path.write_text(placement_text(placement), encoding="utf-8")


def placement_text(placement: Placement) -> str:
    """One line a layer."""
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
    """What the JSON of a file holds. Raises PlacementError, NotAPlanError, which do not name it."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise NotAPlanError(f'it does not say "format": "{FORMAT}".')
    if content.get("version") != VERSION:
        raise PlacementError(f"Its version is {content.get('version')!r}; {VERSION} is read.")
    if content.keys() != _KEYS:
        missing, more = sorted(_KEYS - content.keys()), sorted(map(str, content.keys() - _KEYS))
        raise PlacementError(f"Keys are missing ({missing}) or unknown ({more}).")
    if not isinstance(content["layers"], dict):
        raise PlacementError("Its layers are not an object of layer number to experts.")
    layers = {}
    for key, experts in content["layers"].items():
        if not _is_layer(key):
            raise PlacementError(f"{str(key)[:20]!r} is not the number of a layer, as text.")
        layers[int(key)] = _experts(key, experts)
    numbers = {key: content[key] for key in ("num_ranks", "num_experts")}
    for key, value in numbers.items():
        if not _is_number(value):
            raise PlacementError(f"{key} is {value!r}, not a number.")
    placement = Placement(**numbers, ranks_of=layers)
    if not layers:
        raise PlacementError("It has no layers.")
    if placement.lost:
        first = placement.lost[0]
        raise PlacementError(
            f"{len(placement.lost)} experts are on no rank, the first is expert {first.expert} of "
            f"layer {first.layer}."
        )
    return placement


def _experts(layer: str, experts: Any) -> RanksOf:
    if not isinstance(experts, list):
        raise PlacementError(f"Layer {layer} is {experts!r}, not a list by expert.")
    for expert, ranks in enumerate(experts):
        if not isinstance(ranks, list) or not all(_is_number(rank) for rank in ranks):
            raise PlacementError(
                f"Layer {layer}, expert {expert}: {ranks!r} is not a list of rank numbers."
            )
    return tuple(map(tuple, experts))


def _is_layer(key: Any) -> bool:
    """In YAML a key may be anything."""
    is_short = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10
    return is_short and key == str(int(key))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def parse_json(text: str) -> Any:
    """As `json.loads`, less keys that are there twice and numbers that no plan has. Raises
    ValueError, RecursionError."""
    return json.loads(text, object_pairs_hook=_without_repeats, parse_int=_whole_number)


def _whole_number(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise PlacementError(f"It has a number of {len(text)} digits.")
    return int(text)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A layer that is there twice would silently lose one of them."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise PlacementError(f"{repeated!r} is there twice.")
    return content
