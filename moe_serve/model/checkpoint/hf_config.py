"""Reads a Hugging Face `config.json` with types; every error names the file, key and value.

`check_spec` refuses impossible numbers before any weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from moe_serve.errors import CheckpointError
from moe_serve.json_text import parse_json
from moe_serve.model.spec import ModelSpec
from moe_serve.regular_file import is_there, regular_file

_DTYPES = ("float32", "bfloat16", "float16")
_MOST_LAYERS = 10_000  # each layer is laid out before its tensors are looked up
_MAX_HEAD_DIM = 1024  # limit of the compiled kernels


class HFConfig:
    """The `config.json` of a checkpoint folder."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values, self.source = values, source

    @classmethod
    def read(cls, folder: Path) -> HFConfig:
        path = folder / "config.json"
        if not is_there(path):
            raise CheckpointError(
                f"{folder} has no config.json: give the folder of a checkpoint in Hugging Face "
                "layout."
            )
        return cls.of_file(path)

    @classmethod
    def of_file(cls, path: Path) -> HFConfig:
        """Reads a config.json under any file name."""
        try:
            values = parse_json(regular_file(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} must hold a JSON object.")
        return cls(values, str(path))

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def positive_int(self, *keys: str, default: int | None = None) -> int:
        """Returns the first of `keys` that is present and not null (keys were renamed over
        time)."""
        for key in keys:
            value = self.get(key)
            if value is not None:
                if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
                    if key == "num_hidden_layers" and value > _MOST_LAYERS:
                        raise self.error(key, f"is {value}; at most {_MOST_LAYERS} are served")
                    return value
                raise self.error(keys[0], f"must be a positive integer, is {_shown(value)}")
        if default is None:
            raise self.error(keys[0], "is missing")
        return default

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not _is_finite(value):
            raise self.error(key, f"must be a number, is {_shown(value)}")
        return float(value)

    def whole_numbers(self, key: str) -> tuple[int, ...]:
        """Returns a list of whole numbers; empty if the key is missing or null."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self.error(key, f"must be a list of whole numbers, is {value!r}")
        return tuple(value)

    def require(self, key: str, expected: Any, *, default: Any) -> None:
        """Refuses a checkpoint whose `key` requires an unsupported feature."""
        value = self.get(key, default)
        if value != expected:
            raise self.error(key, f"is {value!r}; only {expected!r} is supported")

    def architecture(self) -> str:
        names = self.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise self.error("architectures", f"must name one architecture, is {names!r}")
        return names[0]

    def dtype(self) -> Literal["float32", "bfloat16", "float16"] | None:
        """Returns the stated dtype; None if the file states none (GPT-OSS and MiniMax-M2 as
        published)."""
        name = self.get("dtype") or self.get("torch_dtype")
        if name is None:
            return None
        if name not in _DTYPES:
            raise self.error("dtype", f"is {name!r}; supported are {', '.join(_DTYPES)}")
        return cast(Literal["float32", "bfloat16", "float16"], name)

    def eos_token_ids(self) -> tuple[int, ...]:
        value = self.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise self.error("eos_token_id", f"must be token ids, is {value!r}")
        return tuple(ids)

    def text(self) -> HFConfig:
        """Returns the text model's part of a larger model's config; the config itself if it has no
        such part.
        """
        part = self.get("text_config")
        if part is None:
            return self
        if not isinstance(part, Mapping):
            raise self.error("text_config", f"must be an object, is {part!r}")
        outer = ("architectures", "quantization_config", "dtype", "torch_dtype", "eos_token_id")
        kept = {key: self._values[key] for key in outer if self.get(key) is not None}
        stated = {k: v for k, v in part.items() if v is not None or k not in kept}
        values = {**kept, **stated, "architectures": kept.get("architectures")}
        if self.get("tie_word_embeddings") is not None:  # the head belongs to the larger model
            values["tie_word_embeddings"] = self.get("tie_word_embeddings")
        return HFConfig(values, self.source)

    def one_of(self, key: str, choices: Sequence[str], default: str) -> str:
        value = self.get(key, default)
        if value not in choices:
            raise self.error(key, f"is {value!r}; supported are {', '.join(choices)}")
        return str(value)

    def error(self, key: str, complaint: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {key} {complaint}.")

    def quantization(self) -> HFConfig | None:
        """Returns the quantisation part of the config, under any of its known keys; None for plain
        weights.

        Wrappers of several models state it at the top or in the text model's part.
        """
        for outer in (self._values, self.get("text_config") or {}):
            for key in ("quantization_config", "compression_config"):
                if isinstance(outer, Mapping) and outer.get(key) is not None:
                    if not isinstance(outer[key], Mapping):
                        raise self.error(key, "must be an object")
                    return HFConfig(outer[key], f"{self.source}: {key}")
        return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _is_finite(value: float) -> bool:
    """Returns whether a value is finite as a float; JSON allows whole numbers that are too large
    for one.
    """
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def generation_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Returns the end-of-text ids of `generation_config.json`, which override the config's; empty
    if there are none.
    """
    path = folder / "generation_config.json"
    return HFConfig.of_file(path).eos_token_ids() if is_there(path) else ()


def check_spec(spec: ModelSpec, config: HFConfig) -> None:
    """Raises CheckpointError, naming the file and the numbers that disagree."""
    for complaint in (_of_attention(spec), _of_router(spec), _of_tokens(spec)):
        if complaint:
            raise CheckpointError(f"{config.source}: {complaint}.")


def _of_attention(spec: ModelSpec) -> str | None:
    a = spec.attention
    if a.num_heads % a.num_kv_heads:
        return (
            f"num_attention_heads ({a.num_heads}) must be a multiple of num_key_value_heads "
            f"({a.num_kv_heads})"
        )
    if a.head_dim % 2 and spec.latent is None:
        return f"head_dim ({a.head_dim}) must be even"
    if a.head_dim > _MAX_HEAD_DIM:
        return f"heads of {a.head_dim} values are not served, only of up to {_MAX_HEAD_DIM}"
    for dim in {spec.rope_of(layer).dim for layer in range(spec.num_layers)}:
        if dim % 2 or not 0 < dim <= a.head_dim:
            return (
                f"the number of rotated values ({dim}) must be even and at most {a.head_dim}, "
                "the size of a head"
            )
    return None


def _of_router(spec: ModelSpec) -> str | None:
    r = spec.router.shape
    if r.top_k > r.num_experts:
        return f"num_experts_per_tok ({r.top_k}) exceeds num_experts ({r.num_experts})"
    if r.num_experts % r.num_groups:
        return f"{r.num_experts} experts do not make {r.num_groups} equal groups (n_group)"
    if r.num_groups_kept > r.num_groups:
        return f"topk_group ({r.num_groups_kept}) exceeds n_group ({r.num_groups})"
    size = r.num_experts // r.num_groups
    if r.num_groups > 1 and r.num_groups_kept * size < r.top_k:
        return (
            f"{r.num_groups_kept} groups (topk_group) of {size} experts are fewer than "
            f"num_experts_per_tok ({r.top_k})"
        )
    if r.num_groups > 1 and r.group_score == "top2" and size < 2:
        return (
            f"n_group is {r.num_groups}, which puts one expert into each group, but a group is "
            "scored by its two best experts"
        )
    if spec.router.is_weighing_inputs and r.top_k != 1:
        return f"num_experts_per_tok is {r.top_k}; only 1 is supported where weights scale inputs"
    return None


def _of_tokens(spec: ModelSpec) -> str | None:
    wrong = [i for i in spec.eos_token_ids if i >= spec.vocab_size]
    if wrong:
        return f"eos_token_id {wrong[0]} is outside the vocabulary of {spec.vocab_size} tokens"
    return None
