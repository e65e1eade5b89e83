"""A service tier: the targets of its requests, and the weight of their delay.

A tier is written as a mapping, in YAML or as JSON:

    scheduler:
      tiers:
        interactive: {weight: 4, ttft_s: 1.0, tpot_s: 0.1}
        flex: {weight: 1, e2e_s: 600, sheddable: true}
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from moe_serve.errors import ConfigError, shortened

RunawaysName = Literal["demote", "end"]  # treatment of an answer over its predicted limit
MAX_TIERS = 16
MAX_TARGET_S = 604800.0  # a week
TIER_RANGES: Mapping[str, tuple[float, float]] = {
    "weight": (0.001, 1000.0),
    "ttft_s": (0.001, MAX_TARGET_S),
    "tpot_s": (0.0001, 3600.0),
    "e2e_s": (0.001, MAX_TARGET_S),
    "max_output_tokens": (1, 2**31 - 1),
    "predicted_output_limit": (1, 1000),
}
TIERS_TAKE = (
    f"a mapping of at most {MAX_TIERS} names to settings, such as "
    "{interactive: {weight: 4, ttft_s: 1.0}}"
)
_NAME = re.compile(r"[a-z0-9_-]{1,32}")
_RESERVED = ("auto",)  # as a service_tier it leaves the choice to the server
_FIELD_OF = {"sheddable": "is_sheddable"}  # the names in YAML that differ from the class's
_RUNAWAYS: tuple[RunawaysName, ...] = get_args(RunawaysName)
_FIELDS = (*TIER_RANGES, "sheddable", "runaways")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """One service tier. A target that is None is not set."""

    name: str
    weight: float = 1.0  # how much a second of delay counts, beside that of other tiers
    ttft_s: float | None = None  # from the arrival to the first token
    tpot_s: float | None = None  # between two tokens, on average
    e2e_s: float | None = None  # from the arrival to the last token
    is_sheddable: bool = False  # YAML: sheddable; may be refused when its target cannot be met
    max_output_tokens: int | None = None  # a hard limit of every answer; None: none
    predicted_output_limit: float | None = None  # times the P90 of recent answers; None: none
    runaways: RunawaysName = "demote"  # answers over this: go behind their tier, or end


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A value as it was written, and its place. A mapping holds further `Written` values."""

    value: object
    source: str  # completes "... (from {source})"

    @classmethod
    def of(cls, value: object, source: str) -> Written:
        """Wraps a plain value whose parts all have the same place."""
        if isinstance(value, Mapping):
            value = {str(name): cls.of(part, source) for name, part in value.items()}
        return cls(value=value, source=source)


def check_tiers(value: object, path: str, source: str) -> tuple[TierConfig, ...]:
    """Checks the tiers of the key `path`, as they are written or as they were built in code.

    Returns them in their order. Raises ConfigError with the place of the wrong value.
    """
    if isinstance(value, tuple) and all(isinstance(item, TierConfig) for item in value):
        plain = plain_tiers(value)
        if len(plain) < len(value):
            raise ConfigError(f"{path} ({source}): two tiers have the same name.")
        value = plain
    written = value if isinstance(value, Written) else Written.of(value, source)
    entries = written.value
    if not isinstance(entries, Mapping):
        raise _wrong(path, entries, written.source, TIERS_TAKE)
    if len(entries) > MAX_TIERS:
        raise ConfigError(
            f"{path} has {len(entries)} tiers ({written.source}): at most {MAX_TIERS} are allowed."
        )
    return tuple(_read_tier(name, entry, path) for name, entry in entries.items())


def tiers_json(text: str, path: str, source: str) -> object:
    """Returns the mapping that a JSON text holds. Raises ConfigError if it is not JSON."""

    try:
        return _mappings(json.loads(text, object_pairs_hook=tuple), path, source)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be {shortened(repr(text))} ({source}): it is not JSON; write a mapping "
            'such as {"interactive": {"weight": 4, "ttft_s": 1.0}}.'
        ) from error


def _mappings(value: object, path: str, source: str) -> object:
    """Converts objects of JSON, given as tuples of pairs. Raises ConfigError for a name that is
    there twice."""
    if not isinstance(value, tuple):
        return value
    found: dict[str, object] = {}
    for name, part in value:
        own = f"{path}.{shortened(name)}"
        if name in found:
            raise ConfigError(f"{own} is set twice ({source}): leave one of them out.")
        found[name] = _mappings(part, own, source)
    return found


def plain_tiers(tiers: Sequence[TierConfig]) -> dict[str, dict[str, object]]:
    """Returns the mapping that `check_tiers` reads back. Values that are defaults are left out."""
    plain: dict[str, dict[str, object]] = {}
    for tier in tiers:
        values = {name: getattr(tier, _FIELD_OF.get(name, name)) for name in _FIELDS}
        plain[tier.name] = {
            name: values[name] for name in _FIELDS if values[name] != _default(name)
        }
    return plain


def find_tier(tiers: Sequence[TierConfig], name: str) -> TierConfig | None:
    return next((tier for tier in tiers if tier.name == name), None)


def _default(name: str) -> object:
    fields = {field.name: field.default for field in dataclasses.fields(TierConfig)}
    return fields[_FIELD_OF.get(name, name)]


def _read_tier(name: str, entry: Written, path: str) -> TierConfig:
    if not _NAME.fullmatch(name) or name in _RESERVED:
        why = "is reserved" if name in _RESERVED else "is not valid"
        raise ConfigError(
            f"{path}: the name {shortened(name)!r} {why} ({entry.source}); a tier's name has 1 to "
            "32 of the characters a-z, 0-9, _ and -, and is not auto."
        )
    own = f"{path}.{name}"
    fields = {} if entry.value is None else entry.value
    if not isinstance(fields, Mapping):
        raise _wrong(own, fields, entry.source, f"a mapping of {', '.join(_FIELDS)}")
    for field, value in fields.items():
        if field not in _FIELDS:
            raise _unknown_field(own, field, value.source)
    values: dict[str, Any] = {
        _FIELD_OF.get(str(field), str(field)): _checked(own, str(field), value)
        for field, value in fields.items()
    }
    tier = TierConfig(name=name, **values)
    _check_targets(tier, own, entry.source)
    return tier


def _unknown_field(own: str, field: str, source: str) -> ConfigError:
    nearest = difflib.get_close_matches(field, _FIELDS, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(_FIELDS)}."
    return ConfigError(f"unknown key {own}.{shortened(field)} ({source}): {hint}")


def _checked(own: str, field: str, written: Written) -> object:
    """Returns the value of a field in its type; a target that is null is not set."""
    value = written.value
    if field == "sheddable":
        words = {"yes": True, "on": True, "no": False, "off": False}
        value = words.get(value.lower(), value) if isinstance(value, str) else value
        if isinstance(value, bool):
            return value
        raise _wrong(f"{own}.{field}", written.value, written.source, "true or false")
    if field == "runaways":
        if value in _RUNAWAYS:
            return value
        raise _wrong(f"{own}.{field}", value, written.source, " or ".join(_RUNAWAYS))
    if value is None and _default(field) is None:
        return None
    low, high = TIER_RANGES[field]
    is_whole = field == "max_output_tokens"
    kinds = (int,) if is_whole else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if is_number and low <= value <= high and not math.isnan(value):  # type: ignore[operator,arg-type]
        return value if is_whole else float(value)  # type: ignore[arg-type]
    noun = "an integer" if is_whole else "a number"
    rest = "" if field == "weight" else ", or null"
    raise _wrong(
        f"{own}.{field}", written.value, written.source, f"{noun} in [{low:g}, {high:.10g}]{rest}"
    )


def _wrong(path: str, value: object, source: str, takes: str) -> ConfigError:
    plain = _plain(value)
    return ConfigError(f"{path} cannot be {shortened(repr(plain))} ({source}): it takes {takes}.")


def _plain(value: object) -> object:
    if isinstance(value, Written):
        value = value.value
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return value


def _check_targets(tier: TierConfig, own: str, source: str) -> None:
    """Refuses targets that contradict each other, and settings that nothing could follow."""
    if (clash := contradiction(tier.ttft_s, tier.tpot_s, tier.e2e_s)) is not None:
        first, second = clash
        raise ConfigError(
            f"{own} has e2e_s {tier.e2e_s:.10g} below its {first} {second:.10g} ({source}): the "
            "last token cannot come before the first one; raise e2e_s or leave one of them out."
        )
    if tier.is_sheddable and tier.ttft_s is None and tier.e2e_s is None:
        raise ConfigError(
            f"{own} is sheddable but has no target that could be missed ({source}): set ttft_s or "
            "e2e_s too, or leave sheddable out."
        )
    if tier.runaways != "demote" and tier.predicted_output_limit is None:
        raise ConfigError(
            f"{own} has runaways {tier.runaways} but no limit that an answer could reach "
            f"({source}): set predicted_output_limit too, or leave runaways out."
        )


def contradiction(
    ttft_s: float | None, tpot_s: float | None, e2e_s: float | None
) -> tuple[str, float] | None:
    """Returns the name and value of a target that is longer than `e2e_s`, the time of the whole
    answer; None if the targets fit."""
    for name, target in (("ttft_s", ttft_s), ("tpot_s", tpot_s)):
        if target is not None and e2e_s is not None and target > e2e_s:
            return name, target
    return None
