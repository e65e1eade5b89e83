"""The cells of a server: groups of ranks that step independently of each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_serve.errors import ConfigError

CellRole = Literal["prefill", "decode", "both"]
HandOverName = Literal["auto", "always", "off"]
AutoscaleName = Literal["static", "target", "planned"]
PageLinkName = Literal["auto", "shared", "tcp", "nixl"]

MAX_CELLS = 64
MAX_PROCESSES = 8192  # of all cells
_TAKES = (
    "it takes groups such as '1x(1A1E prefill) 2x(1A2E tp2 decode)': a count, attention ranks (A), "
    "expert ranks (E), the processes of each attention rank (tp, 1 if left out), and a role "
    "(prefill, decode or both; both if left out)"
)
_GROUP = re.compile(
    r"(?:([1-9]\d{0,3})x)?\(\s*([1-9]\d{0,3})(?:A([1-9]\d{0,3})E|D)"
    r"(?:\s+tp([1-9]\d?))?(?:\s+(prefill|decode|both))?\s*\)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellShape:
    """The ranks of a cell and its role. The role is a preference: every cell can do both.

    `expert_ranks` 0: the experts are spread over the devices of the attention ranks. Such cells are
    simulated, and not served.
    """

    attention_ranks: int
    expert_ranks: int
    attention_tp: int = 1
    role: CellRole = "both"

    def __str__(self) -> str:
        return f"({self.ranks} {self.role})"

    @property
    def ranks(self) -> str:
        """The ranks as in a layout: `1A2E tp2`."""
        tp = f" tp{self.attention_tp}" if self.attention_tp > 1 else ""
        whole = f"{self.num_processes}D{tp}"
        return f"{self.attention_ranks}A{self.expert_ranks}E{tp}" if self.expert_ranks else whole

    @property
    def num_processes(self) -> int:
        return self.attention_ranks * self.attention_tp + self.expert_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class CellsConfig:
    """Several cells under one coordinator, and how requests move between them."""

    layout: str | None = None  # such as "1x(1A1E prefill) 1x(1A1E decode)"; None: one cell
    hand_over: HandOverName = "auto"  # prompts to prefill cells; auto: if measured times say so
    min_tokens: int = 256  # uncached prompt tokens below which a prompt stays where it decodes
    link: PageLinkName = "auto"  # of KV pages; auto: shared memory on one host, else tcp
    parcel_bytes: int = 4 * 2**20  # of KV pages that one parcel carries
    memory_bytes: int = 256 * 2**20  # of the shared memory that parcels pass through
    migrate: bool = True  # move running requests off cells that drain or run out of pages
    prefill_nice: int = 0  # niceness of the ranks of prefill cells
    can_grow: bool = False  # a layout of one cell may get more while it runs, as others may
    autoscale: AutoscaleName = "static"  # how the number of cells follows the load
    min_cells: int = 1  # of each role, with autoscale
    max_cells: int | None = None  # likewise; None: only without autoscale
    added: str | None = None  # cells that are added, one for each role; None: as in `layout`
    scale_every_s: float = 30.0  # between two decisions
    calm_s: float = 600.0  # for which fewer cells must have been wanted before one is removed
    max_changes: int = 4  # changes of the number of cells in any hour
    target_load: float = 0.7  # for "target": requests over seats
    scale_plan: str | None = None  # for "planned": a file that `simulate --plan-out` wrote

    @property
    def is_scaled(self) -> bool:
        """True if the number of cells follows the load."""
        return self.autoscale != "static"


def parse_cells(
    text: str,
    name: str = "cells.layout",
    *,
    is_simulated: bool = False,
    has_all_roles: bool = True,
) -> tuple[CellShape, ...]:
    """Parses a layout such as "1x(1A1E prefill) 2x(1A2E tp2 decode)" into one shape for each cell.

    `name` names the setting in errors. `is_simulated`: also accepts (8D tp2), a cell of eight
    devices with both attention and experts. `has_all_roles`: the cells must serve by themselves.
    Raises ConfigError.
    """
    shapes: list[CellShape] = []
    position, rest = 0, text.strip()
    while position < len(rest):
        found = _GROUP.match(rest, position)
        if found is None or (found[3] is None and not is_simulated):
            also = ", or cells of whole devices such as (8D tp4)" if is_simulated else ""
            raise ConfigError(f"{name} cannot be {text!r}: {_TAKES}{also}.")
        shapes += [_shape_of(found, name)] * int(found[1] or 1)
        position = found.end()
        while position < len(rest) and rest[position].isspace():
            position += 1
    if not shapes:
        raise ConfigError(f"{name} cannot be empty: {_TAKES}.")
    if len(shapes) > MAX_CELLS:
        raise ConfigError(f"{name} has {len(shapes)} cells: use at most {MAX_CELLS}.")
    num_processes = sum(shape.num_processes for shape in shapes)
    if num_processes > MAX_PROCESSES:
        raise ConfigError(
            f"{name} has {num_processes} processes in all: use at most {MAX_PROCESSES}."
        )
    if has_all_roles:
        check_roles(shapes, name)
    return tuple(shapes)


def parse_cell(text: str, name: str = "shape") -> CellShape:
    """Parses one cell such as "1A1E decode" or "(1A2E tp2)". `name` names the field in errors.
    Raises ConfigError."""
    inner = text.strip()
    inner = inner[1:-1] if inner.startswith("(") and inner.endswith(")") else inner
    found = _GROUP.fullmatch(f"({inner})")
    if found is None or found[3] is None:
        raise ConfigError(
            f"{name} cannot be {text[:200]!r}: it takes one cell such as '1A1E' or '1A2E tp2 "
            "decode': attention ranks (A), expert ranks (E), the processes of each attention rank "
            "(tp, 1 if left out), and a role (prefill, decode or both; both if left out)."
        )
    return _shape_of(found, name)


def added_shapes(config: CellsConfig) -> dict[CellRole, CellShape]:
    """Returns the cell that autoscaling adds for each role that it scales. Raises ConfigError."""
    layout = parse_cells(config.layout or "")
    if config.added is None:
        return {shape.role: shape for shape in reversed(layout)}
    text = config.added if "(" in config.added else f"({config.added})"
    found: dict[CellRole, CellShape] = {}
    roles = {shape.role for shape in layout}
    for shape in parse_cells(text, "cells.added", has_all_roles=False):
        if shape.role in found:
            raise ConfigError(
                f"cells.added is {config.added!r}, which has more than one cell of the role "
                f"{shape.role}: give one for each role."
            )
        if shape.role not in roles:
            raise ConfigError(
                f"cells.added is {config.added!r}, but cells.layout {config.layout!r} has no cell "
                f"of the role {shape.role}: use a role that it has."
            )
        found[shape.role] = shape
    return found


def _shape_of(group: re.Match[str], name: str) -> CellShape:
    _, ranks, experts, shards, role = group.groups()
    return CellShape(
        attention_ranks=int(ranks) if experts else _whole_ranks(group, name),
        expert_ranks=int(experts or 0),
        attention_tp=int(shards or 1),
        role=_role(role or "both"),
    )


def check_roles(shapes: Sequence[CellShape], name: str = "cells.layout") -> None:
    """Raises ConfigError if the cells have no role left for decoding or for prompts."""
    roles = {shape.role for shape in shapes}
    for role, other in (("decode", "prefill"), ("prefill", "decode")):
        if roles == {other}:
            raise ConfigError(
                f"{name} has cells with the role {other} and none with the role {role} or both: "
                f"give one the role {role}, or leave the roles out."
            )


def _whole_ranks(group: re.Match[str], name: str) -> int:
    """Returns the attention ranks of a cell such as (8D tp2): 4. Raises ConfigError."""
    num_devices, num_shards = int(group[2]), int(group[4] or 1)
    if num_devices % num_shards:
        raise ConfigError(
            f"{name} has {group[0].strip()}: {num_devices} devices do not divide into attention "
            f"ranks of {num_shards}."
        )
    return num_devices // num_shards


def _role(text: str) -> CellRole:
    roles: dict[str, CellRole] = {"prefill": "prefill", "decode": "decode", "both": "both"}
    return roles[text.lower()]
