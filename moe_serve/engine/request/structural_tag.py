"""Reads tags in free text from a request, in the two known forms, and checks that they are
distinct.

    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}
    {"format": {"type": "triggered_tags", "triggers": [...], "tags": [
        {"begin", "content": {"type": "json_schema", "json_schema": {...}}, "end"}]}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from moe_serve.errors import InvalidGrammarError

MAX_TAGS = 128
MAX_TRIGGERS = 32
MAX_TAG_CHARS = 512  # in a begin, an end or a trigger

_ACCEPTED = (
    "format must be triggered_tags with triggers, and tags with begin, content and end, where "
    "content has the type json_schema"
)

_Begin = Annotated[str, Meta(min_length=1, max_length=MAX_TAG_CHARS)]
_End = Annotated[str, Meta(max_length=MAX_TAG_CHARS)]
_Triggers = Annotated[list[_Begin], Meta(min_length=1, max_length=MAX_TRIGGERS)]
_Schema = dict[str, Any] | str
_Form = TypeVar("_Form")


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: _Begin
    schema: _Schema
    end: _End


class _Structures(msgspec.Struct, forbid_unknown_fields=True):
    structures: Annotated[list[_Structure], Meta(min_length=1, max_length=MAX_TAGS)]
    triggers: _Triggers
    type: Literal["structural_tag"] = "structural_tag"


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    json_schema: _Schema
    style: Literal["json"] = "json"
    any_order: bool = False


class _FormatTag(msgspec.Struct, forbid_unknown_fields=True):
    begin: _Begin
    content: _Content
    end: _End
    type: Literal["tag"] = "tag"


class _TriggeredTags(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["triggered_tags"]
    triggers: _Triggers
    tags: Annotated[list[_FormatTag], Meta(min_length=1, max_length=MAX_TAGS)]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Annotated[list[str], Meta(max_length=0)] = []


class _Format(msgspec.Struct, forbid_unknown_fields=True):
    format: _TriggeredTags
    type: Literal["structural_tag"] = "structural_tag"


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag whose `schema` describes the JSON between `begin` and `end`. `place` and `schema_place`
    are positions in the request."""

    begin: str
    schema: Mapping[str, Any]
    end: str
    place: str
    schema_place: str

    @property
    def json_starts(self) -> str:
        return "{" if self.schema.get("type") == "object" else '{["-0123456789tfn'


@dataclass(frozen=True, slots=True)
class Trigger:
    text: str
    place: str


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Tags and triggers. No trigger contains another one, and each tag begins with exactly one."""

    tags: tuple[Tag, ...]
    triggers: tuple[Trigger, ...]

    def tags_of(self, trigger: Trigger) -> list[int]:
        """Returns the indices of tags that begin with a trigger. If empty, the trigger may not
        appear."""
        return [i for i, tag in enumerate(self.tags) if tag.begin.startswith(trigger.text)]


class StructuralTagError(InvalidGrammarError):
    """An invalid structural tag. The message is part of a sentence and begins with `place`, if
    known."""


def read_structural_tag(source: str) -> StructuralTag:
    """Parses and checks a structural tag. Raises StructuralTagError."""
    try:
        value = msgspec.json.decode(source)
    except RecursionError:
        raise StructuralTagError("it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise StructuralTagError(f"it is not valid JSON: {error}") from None
    is_format = isinstance(value, dict) and "format" in value
    tags, triggers = _read_format(value) if is_format else _read_structures(value)
    at = "format.triggers" if is_format else "triggers"
    kept = _first_triggers(triggers, at)
    for tag in tags:
        if not any(tag.begin.startswith(trigger.text) for trigger in kept):
            raise _error(f"{tag.place}.begin", "starts with none of the triggers")
    _check_begins(tags)
    return StructuralTag(tuple(tags), tuple(kept))


def _read_structures(value: Any) -> tuple[list[Tag], list[str]]:
    read = _convert(value, _Structures)
    tags = []
    for i, item in enumerate(read.structures):
        place = f"structures.{i}"
        at = f"{place}.schema"
        tags.append(Tag(item.begin, _schema(item.schema, at), item.end, place, at))
    return tags, read.triggers


def _read_format(value: Any) -> tuple[list[Tag], list[str]]:
    read = _convert(value, _Format, hint=f"; {_ACCEPTED}").format
    for name in ("at_least_one", "stop_after_first"):
        if getattr(read, name):
            raise _error(f"format.{name}", "must be false: tags may come any number of times")
    tags = []
    for i, item in enumerate(read.tags):
        place = f"format.tags.{i}"
        if item.content.any_order:
            raise _error(f"{place}.content.any_order", "must be false")
        at = f"{place}.content.json_schema"
        tags.append(Tag(item.begin, _schema(item.content.json_schema, at), item.end, place, at))
    return tags, read.triggers


def _convert(value: Any, kind: type[_Form], hint: str = "") -> _Form:
    """Converts a value. msgspec's errors end with ` - at `$.structures[3].begin``."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        place = re.sub(r"\[(\d+)\]", r".\1", path.rstrip("`")).lstrip(".")
        if field := re.match(r"Object (?:missing|contains).* field `(\w{1,100})`", what):
            place = f"{place}.{field[1]}".lstrip(".")
            is_missing = what.startswith("Object missing")
            raise _error(place, ("is missing" if is_missing else "is not known") + hint) from None
        raise StructuralTagError(
            f"{place}: {_in_our_words(what)}{hint}".removeprefix(": "), place=place
        ) from None


def _in_our_words(what: str) -> str:
    if size := re.fullmatch(r"Expected `(str|array)` of length ([<>])= (\d+)", what):
        noun = "characters" if size[1] == "str" else "entries"
        return f"it must have at {'most' if size[2] == '<' else 'least'} {size[3]} {noun}"
    return what[:1].lower() + what[1:]


def _schema(schema: _Schema, place: str) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        decoded = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict):
        raise _error(place, "must be an object, or a string that holds one")
    return decoded


def _first_triggers(triggers: Sequence[str], at: str) -> list[Trigger]:
    """Drops triggers that begin with another trigger, as the shorter one always matches first."""
    kept: list[Trigger] = []
    for i, trigger in enumerate(triggers):
        if trigger in triggers[:i]:
            continue
        others = [k for k, other in enumerate(triggers) if other != trigger and other in trigger]
        if any(trigger.startswith(triggers[k]) for k in others):
            continue
        if others:
            raise _error(
                f"{at}.{i}", f"holds {at}.{others[0]}, so it is not clear which of them has come"
            )
        kept.append(Trigger(trigger, f"{at}.{i}"))
    return kept


def _check_begins(tags: Sequence[Tag]) -> None:
    """Checks that no two begins are equal, and that no begin continues another one as its JSON
    might: the two could not be told apart.
    """
    earlier: dict[str, Tag] = {}
    for tag in tags:
        same = earlier.setdefault(tag.begin, tag)
        if same is not tag:
            raise _error(
                f"{tag.place}.begin",
                f"is also that of {same.place}: use one tag with both schemas in anyOf instead",
            )
    for tag in tags:
        for length in range(1, len(tag.begin)):
            other, char = earlier.get(tag.begin[:length]), tag.begin[length]
            if other is not None and char in other.json_starts:
                raise _error(
                    f"{tag.place}.begin",
                    f"continues {other.place}.begin with {char!r}, with which the JSON of that tag "
                    "may begin too: the two cannot be told apart",
                )


def _error(place: str, what: str) -> StructuralTagError:
    return StructuralTagError(f"{place or 'it'} {what}", place=place)
