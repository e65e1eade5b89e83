"""The table of configuration keys, derived from the dataclasses in `sections.py`, and their ranges.

A key is `section.name`: the section is the component (`model`, `cache`, `kv_events`, `scheduler`,
`pipeline`, `predictor`, `speculation`, `adapters`, `cluster`, `cells`, `trace`, `server`, `log`).
So `scheduler.max_num_seqs` is `Config.engine.scheduler.max_num_seqs`. A new field in `sections.py`
is a new key automatically; only its range is written here.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moe_serve.config.cells import MAX_CELLS
from moe_serve.config.checks import check_together
from moe_serve.config.sections import Config, EngineConfig
from moe_serve.config.tiers import TIERS_TAKE, TierConfig, check_tiers, plain_tiers, tiers_json
from moe_serve.errors import ConfigError, shortened

Scalar = bool | int | float | str
Value = Scalar | tuple[str, ...] | tuple[TierConfig, ...] | None

_MANY = 2**31 - 1
_UNIONS = (types.UnionType, typing.Union)
RANGES: Mapping[str, tuple[float, float]] = {
    "model.max_merged_models": (1, 1_000_000),
    "model.expert_memory_bytes": (1, 2**50),
    "model.max_model_len": (1, _MANY),
    "model.num_threads": (1, 1024),
    "model.cuda_graph_max_rows": (1, 65536),
    "cache.num_pages": (1, _MANY),
    "cache.memory_bytes": (1, 2**50),
    "cache.metrics_sample": (0.0, 1.0),
    "cache.disk_bytes": (1, 2**50),
    "cache.disk_min_free_bytes": (0, 2**50),
    "cache.disk_write_bytes_per_day": (1, 2**50),
    "cache.disk_ttl_s": (1.0, 31536000.0),
    "cache.memory_tier_bytes": (1, 2**50),
    "cache.checkpoint_after_s": (0.0, 86400.0),
    "kv_events.buffer_steps": (1, 2**20),
    "kv_events.hwm": (1, _MANY),
    "scheduler.max_num_seqs": (1, 65536),
    "scheduler.max_batched_tokens": (1, 2**20),
    "scheduler.max_queued_requests": (1, _MANY),
    "scheduler.expert_capacity": (1, 65536),
    "scheduler.max_passed_over": (0, 2**20),
    "scheduler.max_passed_over_s": (0.0, 3600.0),
    "scheduler.max_held_s": (0.0, 3600.0),
    "scheduler.patience_s": (0.01, 3600.0),
    "scheduler.max_wait_s": (0.1, 604800.0),
    "scheduler.min_prefill_tokens": (1, 2**20),
    "scheduler.parked_bytes": (1, 2**40),
    "pipeline.micro_batches": (1, 4),
    "predictor.min_recall": (0.0, 1.0),
    "predictor.refresh_tokens": (1, 2**20),
    "speculation.max_tokens": (1, 16),
    "speculation.prompt_lookup_min": (1, 64),
    "speculation.prompt_lookup_max": (1, 64),
    "speculation.suffix_max_tokens": (1024, 2**28),
    "speculation.self_experts": (1, 64),
    "adapters.memory_bytes": (1, 2**50),
    "adapters.max_adapters": (1, 100_000),
    "adapters.max_rank": (1, 1024),
    "cluster.attention_ranks": (0, 4096),
    "cluster.expert_ranks": (0, 4096),
    "cluster.attention_tp": (1, 64),
    "cluster.rebalance_interval_s": (1.0, 604800.0),
    "cluster.rebalance_min_gain": (0.0, 1.0),
    "cluster.rebalance_max_moves": (1, 65536),
    "cluster.rebalance_bytes_per_s": (1024, 2**40),
    "cluster.rebalance_spare_slots": (0, 65536),
    "cluster.port": (0, 65535),
    "cluster.heartbeat_s": (0.05, 600.0),
    "cluster.timeout_s": (0.1, 3600.0),
    "cluster.start_timeout_s": (1.0, 86400.0),
    "cluster.rejoin_s": (0.0, 86400.0),
    "cells.min_tokens": (1, 2**20),
    "cells.parcel_bytes": (1024, 2**30),
    "cells.memory_bytes": (2**20, 2**40),
    "cells.prefill_nice": (0, 19),
    "cells.min_cells": (1, MAX_CELLS),
    "cells.max_cells": (1, MAX_CELLS),
    "cells.scale_every_s": (0.1, 86400.0),
    "cells.calm_s": (0.0, 86400.0),
    "cells.max_changes": (1, 3600),
    "cells.target_load": (0.01, 1.0),
    "trace.sample_rate": (0.0001, 1.0),
    "trace.part_bytes": (64 * 1024, 2**30),
    "trace.max_bytes": (64 * 1024, 2**50),
    "server.port": (0, 65535),
    "server.max_body_bytes": (1024, 2**30),
    "server.drain_timeout_s": (0.0, 3600.0),
    "server.sse_ping_s": (0.1, 3600.0),
    "server.max_stored_responses": (0, 2**20),
    "server.stored_responses_bytes": (0, 2**40),
    "server.stored_response_ttl_s": (1.0, 2592000.0),
    "server.key_max_concurrent": (1, _MANY),
    "server.key_requests_per_minute": (1, _MANY),
    "server.key_tokens_per_minute": (1, 2**50),
    "server.key_min_priority": (-(2**31), 2**31 - 1),
    "server.hang_report_s": (0.1, 86400.0),
}
SECRETS = frozenset({"server.api_keys", "server.admin_keys"})
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}  # for the keys that end in one of these
_YES, _NO = ("yes", "on"), ("no", "off")
_WHOLE = re.compile(r"[-+]?[0-9]{1,19}")
_DECIMAL = re.compile(r"[-+]?([0-9]*\.[0-9]+|[0-9]+\.|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_SETTING = re.compile(r"\w+=\S*")  # after an API key
_SIZES = ("_bytes", "_bytes_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One key: its place, its type and its allowed values."""

    section: str
    name: str
    kind: type  # bool, int, float, str, tuple (of strings), or TierConfig (a tuple of these)
    is_optional: bool
    choices: tuple[str | int, ...]  # all of one kind; empty: any value
    words: tuple[str, ...]  # allowed beside the values of its kind
    default: Value

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def is_secret(self) -> bool:
        return self.path in SECRETS

    @property
    def may_have_settings(self) -> bool:
        return self.path == "server.api_keys"

    @property
    def allowed(self) -> str:
        """The allowed values in words, such as "an integer in [1, 4]"."""
        if self.kind is TierConfig:
            text = TIERS_TAKE
        elif self.choices:
            text = f"one of {', '.join(map(str, self.choices))}"
        elif self.kind is bool:
            text = "true or false"
        elif self.kind is tuple:
            text = "a list of non-empty strings without spaces"
            if self.may_have_settings:
                text += ", except before settings such as tier=NAME"
        elif self.kind is str:
            text = "a non-empty string"
        else:
            text = "an integer" if self.kind is int else "a number"
        if self.path in RANGES:
            low, high = (int(end) if end == int(end) else end for end in RANGES[self.path])
            text += f" in [{low}, {high}]"
        if self.name.endswith(_SIZES):
            text += " or a size such as 512MiB"
        text += "".join(f" or {word}" for word in self.words)
        return text + (", or null" if self.is_optional else "")

    def plain(self, value: Value) -> object:
        """Returns a value of this key as lists and mappings, as YAML and JSON have them."""
        if self.kind is TierConfig:
            assert isinstance(value, tuple), f"{self.path}: tiers are a tuple"
            return plain_tiers([tier for tier in value if isinstance(tier, TierConfig)])
        return list(value) if isinstance(value, tuple) else value

    def check(self, value: object, source: str) -> Value:
        """Returns the value in its type. Raises ConfigError. `source` completes "... (from
        {source})"."""
        if self.kind is TierConfig:
            return check_tiers(value, self.path, source)
        if value is None and self.is_optional:
            return None
        if isinstance(value, str) and value in self.words:
            return value
        checked = self._converted(value)
        if checked is None or not self._is_in_range(checked):
            raise self.error(value, source)
        return checked

    def check_yaml(self, value: object, source: str) -> Value:
        """Checks a YAML value like `check`. `yes`, `no`, `on` and `off` count as true and false for
        keys that take those."""
        if value is None and not self.is_optional:
            raise self.error(value, source, shown="null")
        if isinstance(value, str) and value.lower() in (*_YES, *_NO):
            is_on = value.lower() in _YES
            if self.kind is bool:
                return is_on
            switch = "on" if is_on else "off"
            return self.check(switch if switch in self.choices else value, source)
        return self.check(value, source)

    def parse(self, text: str, source: str) -> Value:
        """Parses the value of an environment variable. A list is written with commas, or as
        JSON."""
        if self.is_optional and text.lower() in ("null", "none"):
            return None
        if self.kind is tuple:
            return self.check(self._listed(text, source), source)
        if self.kind is TierConfig:
            return self.check(tiers_json(text, self.path, source), source)
        if self.kind is bool:
            is_true = text.lower() in ("true", "1", *_YES)
            is_false = text.lower() in ("false", "0", *_NO)
            return self.check(is_true if is_true or is_false else text, source)
        if self.kind is str:
            return self.check(text, source)
        is_number = _WHOLE.fullmatch(text) or (self.kind is float and _DECIMAL.fullmatch(text))
        return self.check(self.kind(text) if is_number else text, source)

    def _listed(self, text: str, source: str) -> object:
        if not text.startswith("["):
            return [part.strip() for part in text.split(",")]
        try:
            return json.loads(text)
        except ValueError as error:
            shown = "this value (not shown)" if self.is_secret else repr(text)
            raise ConfigError(
                f"{self.path} cannot be {shown} ({source}): it begins with [ but is not a "
                'JSON list; write one,two or ["one", "two"].'
            ) from error

    def error(self, value: object, source: str, shown: str = "") -> ConfigError:
        shown = shown or shortened(repr(value))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        quotes = "; write a number in quotes" if self.kind is str and is_number else ""
        return ConfigError(
            f"{self.path} cannot be {'this value (not shown)' if self.is_secret else shown} "
            f"({source}): it takes {self.allowed}{quotes}."
        )

    def _converted(self, value: object) -> Scalar | tuple[str, ...] | None:
        """Returns the value in the key's type; None if it is not of this type."""
        if self.kind is bool:
            return value if isinstance(value, bool) else None
        if self.name.endswith(_SIZES) and isinstance(value, str):
            return parse_size(value)
        if self.kind in (int, float):
            if isinstance(value, bool) or not isinstance(value, int | float):
                return None
            if self.kind is int:
                return value if isinstance(value, int) else None
            return float(value) if isinstance(value, float) or abs(value) < 2**64 else None
        if self.kind is tuple:
            if not isinstance(value, list | tuple):
                return None
            is_clean = all(isinstance(item, str) and self._is_item(item) for item in value)
            return tuple(value) if is_clean else None
        if isinstance(value, bool) and {"on", "off"} & {*self.choices}:  # YAML's on and off
            return "on" if value else "off"
        return value if isinstance(value, str) and value.strip() else None

    def _is_item(self, item: str) -> bool:
        """Returns whether a list may have this string. Settings may follow an API key."""
        words = item.split()
        if self.may_have_settings and item.isprintable() and item.strip() == item:
            return bool(words) and all(_SETTING.fullmatch(word) for word in words[1:])
        return words == [item]

    def _is_in_range(self, value: Scalar | tuple[str, ...]) -> bool:
        if self.choices:
            return value in self.choices
        if self.path in RANGES and isinstance(value, int | float):
            low, high = RANGES[self.path]
            return not math.isnan(value) and low <= value <= high
        return True


def config_keys() -> tuple[ConfigKey, ...]:
    """Returns all keys in the order of `sections.py`."""
    return _keys_of(Config)


def check_engine_config(config: EngineConfig, source: str = "an argument") -> EngineConfig:
    """Checks a config that was built in code against the same limits. Returns it or raises
    ConfigError."""
    for key in _keys_of(EngineConfig):
        key.check(getattr(getattr(config, key.section), key.name), source)
    check_together(config)
    return config


def unknown_name(kind: str, name: str, source: str, known: Iterable[str]) -> ConfigError:
    """Builds the error for a name that is not in the table, with the most similar known name."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(names)}."
    return ConfigError(f"unknown {kind} {name} ({source}): {hint}")


@functools.cache
def _keys_of(component: type, section: str = "") -> tuple[ConfigKey, ...]:
    keys: list[ConfigKey] = []
    hints = typing.get_type_hints(component)
    for item in dataclasses.fields(component):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type), f"{item.name}: a section is a class, got {hint!r}"
            keys += _keys_of(hint, item.name)
            continue
        arms = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)
        core, *others = (arm for arm in arms if arm is not types.NoneType)
        if TierConfig in typing.get_args(core):
            core = TierConfig
        origin = typing.get_origin(core)
        key = ConfigKey(
            section=section,
            name=item.name,
            kind=type(typing.get_args(core)[0]) if origin is typing.Literal else (origin or core),
            is_optional=types.NoneType in arms,
            choices=typing.get_args(core) if origin is typing.Literal else (),
            words=tuple(word for arm in others for word in typing.get_args(arm)),
            default=typing.cast(Value, item.default),
        )
        keys.append(key)
    return tuple(keys)


def parse_size(text: str) -> int | None:
    """Returns the bytes of a size such as "512MiB"; None if it is not a size."""
    number, unit = text.strip()[:-3].strip(), text.strip()[-3:]
    is_size = number.isascii() and number.isdigit() and len(number) < 20 and unit in UNITS
    return int(number) * UNITS[unit] if is_size else None
