"""Reads `config_groups` of a compressed-tensors checkpoint: how each module is stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.hf_config import HFConfig

_LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One config group: the storage of its targets' weights."""

    targets: tuple[str, ...]
    bits: int
    is_float: bool
    is_symmetric: bool
    strategy: str  # one of _STRATEGIES: the weights that share a scale
    group_size: int  # for strategy "group"
    block: tuple[int, int]  # rows and columns, for strategy "block"

    @property
    def name(self) -> str:
        sharing = {
            "tensor": "matrices",
            "channel": "rows",
            "group": f"groups of {self.group_size}",
            "block": f"blocks of {self.block[0]}x{self.block[1]}",
        }
        return f"{'fp' if self.is_float else 'int'}{self.bits} {sharing[self.strategy]}"


def scheme_of(schemes: Sequence[Scheme], module: str) -> Scheme | None:
    """Return the scheme that names the module, else one whose pattern matches, else that of all
    `Linear`s.

    Patterns start with `re:` and must match from the start of the module's name.
    """
    for scheme in schemes:
        if module in scheme.targets:
            return scheme
    for scheme in schemes:
        patterns = (t.removeprefix("re:") for t in scheme.targets if t.startswith("re:"))
        if any(re.match(pattern, module) for pattern in patterns):
            return scheme
    return next((scheme for scheme in schemes if "Linear" in scheme.targets), None)


def schemes_from(config: HFConfig) -> tuple[Scheme, ...]:
    """Read and check all groups; CheckpointError for a layout or a strategy that is not
    supported.
    """
    for key in ("transform_config", "sparsity_config"):
        other = config.get(key) or {}
        if not isinstance(other, dict) or (other and other.get("format") != "dense"):
            raise config.error(key, "is not served; only weights may be quantised")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise config.error("config_groups", f"must be an object of objects, is {groups!r}")
    schemes = []
    for name, group in groups.items():
        section = HFConfig(group, f"{config.source}: {name}")
        layout = section.get("format") or config.get("format")
        if layout not in _LAYOUTS:
            raise section.error("format", f"is {layout!r}; supported are {', '.join(_LAYOUTS)}")
        if section.get("weights") is not None:
            schemes.append(_scheme(section, str(layout)))
    return tuple(schemes)


def _scheme(section: HFConfig, layout: str) -> Scheme:
    weights = section.get("weights")
    if not isinstance(weights, dict):
        raise section.error("weights", f"must be an object, is {weights!r}")
    config = HFConfig(weights, f"{section.source}: weights")
    bits, kind = config.positive_int("num_bits", default=8), config.get("type", "int")
    if kind == "float":
        config.require("num_bits", 8, default=8)
    elif kind != "int" or bits not in (4, 8):
        raise config.error("num_bits", f"is {bits!r} of {kind!r}; supported are 4 and 8 of 'int'")
    if kind == "float" and layout in ("pack-quantized", "int-quantized"):
        raise config.error("type", f"is 'float', which {layout} does not support")
    size = config.get("group_size")
    strategy = config.get("strategy") or _implied_strategy(size)
    if strategy not in _STRATEGIES:
        raise config.error("strategy", f"is {strategy!r}; supported are {', '.join(_STRATEGIES)}")
    return Scheme(
        targets=_targets(section),
        bits=bits,
        is_float=kind == "float",
        is_symmetric=bool(config.get("symmetric", True)),
        strategy=strategy,
        group_size=config.positive_int("group_size") if strategy == "group" else 0,
        block=_block(config) if strategy == "block" else (0, 0),
    )


def _implied_strategy(group_size: Any) -> str:
    return "tensor" if group_size is None else "channel" if group_size == -1 else "group"


def _targets(section: HFConfig) -> tuple[str, ...]:
    targets = section.get("targets")
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise section.error("targets", f"must be a list of names, is {targets!r}")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:"))
        except (re.error, OverflowError, RecursionError) as error:
            raise section.error(
                "targets", f"has {target!r}, which is not a valid pattern: {error}"
            ) from None
    return tuple(targets)


def _block(config: HFConfig) -> tuple[int, int]:
    block = config.get("block_structure")
    if isinstance(block, str):  # "128x128", an older notation
        block = [int(n) if n.isdecimal() else 0 for n in block.split("x")]
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(isinstance(n, int) and n > 0 for n in block):
        raise config.error("block_structure", f"must be two positive integers, is {block!r}")
    return block[0], block[1]


def unknown_module(source: str, stored: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: no config_groups entry has targets that fit tensor {stored}."
    )
