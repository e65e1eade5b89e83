"""Switches single parts of the solvers off, to measure their effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from experts.placement.solvers.fan_out import fan_out_solver, layer_descent, layer_search
from experts.placement.solvers.ilp import layer_state
from experts.placement.solvers.search import descent, improve, search_solver


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A part that can be left out: the place of its code, and the values that replace it."""

    lines: str  # the code that only this part needs
    kind: str  # of problem that the part is for, see `ablation.py`
    patches: tuple[tuple[object, str, object], ...]


_BEST_SWAPS = layer_search.best_swaps  # as it is while a switch replaces it
_SHARP = 1e5  # limited by the range of exponents: only the peak matters


def _sharp(**changes: Any) -> tuple[tuple[object, str, object], ...]:
    """Change fields of every stage."""
    names = ("_FINE", "_BROAD", "_NARROW", "_NARROWEST")
    return tuple((improve, name, _replaced(getattr(improve, name), changes)) for name in names)


def _replaced(stage: descent.DescentStage, changes: Mapping[str, Any]) -> descent.DescentStage:
    fields = {name: getattr(stage, name) for name in ("sharpness", "least", "sizes", "num_pairs")}
    return descent.DescentStage(**{**fields, **changes})


def _nothing(*_: object, **__: object) -> None:
    return None


def _end(*_: object) -> None:
    """Ends a search with its present plan, as Ctrl-C does."""
    raise KeyboardInterrupt


def _one_step(cost_of: Any, device_C: Any, legal: Any, _patience: int, goes_on: Any) -> Any:
    """Swaps copies only while each swap lowers the cost."""
    return _BEST_SWAPS(cost_of, device_C, legal, 1, goes_on)


def _in_one_go(
    self: Any, device_C: Any, crossing_CM: Any, patience: int, goes_on: Callable[[], bool]
) -> Any:
    """Searches a layer on all devices from the start, without the stages of nodes."""
    patience = max(patience, len(device_C) // layer_search._COPIES_PER_PATIENCE)
    whole = self._cost(self._devices, self._weights, crossing_CM)
    found_C = _BEST_SWAPS(whole, device_C, self._limits.is_legal, patience, goes_on)
    is_under = whole.overload(found_C) <= layer_search._EPSILON
    is_better = whole.cost(found_C) < whole.cost(device_C) - layer_search._EPSILON
    return found_C if is_under and is_better else device_C


_FAN_OUT_CLASS, _DESCENT = layer_search.LayerSearch, layer_descent.Descent
SWITCHES: Mapping[str, Switch] = {
    "annealing": Switch(
        lines="search/folding.py, _fold",
        kind="one",
        patches=((improve, "can_fold", lambda _: False),),
    ),
    "soft peak": Switch(
        lines="the sharpness of the stages", kind="one many", patches=_sharp(sharpness=_SHARP)
    ),
    "exchanges of two": Switch(
        lines="the sizes of the stages", kind="one many", patches=_sharp(sizes=(1,))
    ),
    "broad stage": Switch(
        lines="_BROAD", kind="many", patches=((improve, "_BROAD", improve._NARROW),)
    ),
    "kicks": Switch(
        lines="kick_swap, kick_recount, _round, _kick",
        kind="one many",
        patches=((improve, "_round", _end),),
    ),
    "kicks by recount": Switch(
        lines="kick_recount",
        kind="one many",
        patches=((improve, "_RECOUNTS", 0.0), (improve, "_RECOUNTS_OF_MANY", 0.0)),
    ),
    "kicks by swap": Switch(
        lines="kick_swap",
        kind="one many",
        patches=((improve, "_RECOUNTS", 1.0), (improve, "_RECOUNTS_OF_MANY", 1.0)),
    ),
    "sweeps": Switch(
        lines="search/sweep.py, _Sweeps", kind="large", patches=((descent, "MANY", 10**9),)
    ),
    "spending": Switch(
        lines="search/spend.py, _spend", kind="moves", patches=((improve, "_spend", _nothing),)
    ),
    "leaving out": Switch(
        lines="_leave_out, _recount_softly",
        kind="open",
        patches=((improve, "_leave_out", _nothing),),
    ),
    "start without replicas": Switch(
        lines="recount.py:without_replicas",
        kind="open",
        patches=((improve, "without_replicas", lambda state: state),),
    ),
    "renaming": Switch(
        lines="search/search_solver.py:relabelled",
        kind="anew",
        patches=((search_solver, "relabelled", lambda _, copies_LED: copies_LED),),
    ),
    "exact small layers": Switch(
        lines="ilp/small_layers.py",
        kind="small",
        patches=((search_solver, "solve_small", _nothing),),
    ),
    "whole programs": Switch(
        lines="LayerState._whole as a program",
        kind="ilp",
        patches=((layer_state, "_WHOLE_EVERY", 10**9),),
    ),
    "windows": Switch(
        lines="LayerState._part, _next_window",
        kind="ilp",
        patches=((layer_state, "_WHOLE_EVERY", 1),),
    ),
    "tabu": Switch(
        lines="best_swaps past local optima",
        kind="fan-out",
        patches=((layer_search, "best_swaps", _one_step),),
    ),
    "nodes first": Switch(
        lines="two of three searches in LayerSearch.improved",
        kind="fan-out",
        patches=((_FAN_OUT_CLASS, "improved", _in_one_go),),
    ),
    "bundles at first": Switch(
        lines="fan_out/neighbours.py:relabelled",
        kind="fan-out",
        patches=((fan_out_solver, "relabelled", lambda placement, *_: placement),),
    ),
    "bundles in each sweep": Switch(
        lines="Descent._traded",
        kind="fan-out",
        patches=((_DESCENT, "_traded", lambda self, index, _: self.devices[index]),),
    ),
    "exact fan-out": Switch(
        lines="fan_out/fan_out_program.py, Descent.prove",
        kind="small fan-out",
        patches=((_DESCENT, "prove", lambda *_: True),),
    ),
}


@contextmanager
def without(name: str | None) -> Iterator[None]:
    """Leaves one part out; None leaves everything in."""
    with ExitStack() as stack:
        for owner, attribute, value in () if name is None else SWITCHES[name].patches:
            stack.enter_context(patch.object(owner, attribute, value))
        yield
