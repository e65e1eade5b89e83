"""Checks the adapter_config.json of PEFT: which kinds of LoRA are served, and their ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_serve.errors import CheckpointError

# Fields that ask for something which is not computed here, and their harmless values.
_NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "monteclora_config": (None,),
}
_MAX_ALPHA = 1_000_000  # beyond it, additions overflow
_ANY_PARENT = ".*\\."  # PEFT writes it before the names of fused experts; a plain name has it, too
_PLAIN_KEY = re.compile(r"(?:\^|\.\*\\\.)?(?:[\w-]|\\?\.)+\$?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """The fields of a LoRA that its numbers depend on."""

    path: Path
    rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: Mapping[str, int]  # of single modules
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """Returns the rank that the configuration gives a module."""
        return int(_of_module(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Returns the factor of a module's addition: alpha / r, or alpha / sqrt(r)."""
        rank, alpha = self.rank_of(module), _of_module(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_peft_config(path: Path, config: Mapping[str, Any], max_rank: int) -> PeftConfig:
    """Checks a configuration. Raises CheckpointError with the field that is not served."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type is {_shown(kind)}, but only 'LORA' is served.")
    for field, harmless in _NOT_SERVED.items():
        value = config.get(field)
        if not any(value is each or value == each for each in harmless):
            raise CheckpointError(
                f"{path}: {field} is {_shown(value)}, which is not served: train the adapter "
                f"with {field} {_shown(harmless[0])}."
            )
    return PeftConfig(
        path=path,
        rank=_rank(path, "r", config.get("r"), max_rank),
        alpha=_number(path, "lora_alpha", config.get("lora_alpha")),
        is_rank_stabilised=bool(config.get("use_rslora")),
        ranks={
            key: _rank(path, f"rank_pattern.{key}", value, max_rank)
            for key, value in _pattern(path, config, "rank_pattern").items()
        },
        alphas={
            key: _number(path, f"alpha_pattern.{key}", value)
            for key, value in _pattern(path, config, "alpha_pattern").items()
        },
    )


def _pattern(path: Path, config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    pattern = config.get(field) or {}
    if not isinstance(pattern, dict):
        raise CheckpointError(f"{path}: {field} is {_shown(pattern)}, but must be an object.")
    for key in pattern:
        if not _PLAIN_KEY.fullmatch(key):
            raise CheckpointError(
                f"{path}: {field} has the key {_shown(key)}, a regular expression: write the "
                "names of the modules instead."
            )
    return pattern


def _of_module(values: Mapping[str, Any], module: str, default: float) -> float:
    """Returns the value of the first key that is the module's name or its end, as in PEFT."""
    for key, value in values.items():
        plain = key.removeprefix(_ANY_PARENT).replace("\\.", ".").removesuffix("$")
        is_whole = plain.startswith("^")
        plain = plain.removeprefix("^")
        if module == plain or (not is_whole and module.endswith(f".{plain}")):
            return float(value)
    return default


def _rank(path: Path, field: str, value: Any, max_rank: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= max_rank:
        raise CheckpointError(
            f"{path}: {field} is {_shown(value)}, but must be in [1, {max_rank}]; "
            "adapters.max_rank sets the limit."
        )
    return value


def _number(path: Path, field: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _MAX_ALPHA:
        raise CheckpointError(
            f"{path}: {field} is {_shown(value)}, but must be a number in "
            f"[-{_MAX_ALPHA}, {_MAX_ALPHA}]."
        )
    return float(value)


def _shown(value: object) -> str:
    return repr(value)[:100]
