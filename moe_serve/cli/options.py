"""Derives the parameters of a command from a frozen dataclass of its options.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class TopOptions:
        url: str = option("http://127.0.0.1:8000", help="URL of the server.")

    @app.command()
    @with_options(TopOptions)
    def top(options: TopOptions) -> None: ...

If the type of a field is such a dataclass, its fields are added in place of the field, so that
commands can share groups of options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import typer

T = TypeVar("T")
REQUIRED: Any = ...  # in place of a default
_PARAMETER, _KEY, _NAMES = "parameter", "key", "names"


def option(default: T, *flags: str, key: str = "", **how: Any) -> T:
    """Declares an option. `how` is passed to `typer.Option`. `key` is the configuration key that
    the option sets, if it sets one. The default may be REQUIRED.
    """
    return _declared(default, typer.Option(*flags, **how), key, flags)


def argument(default: T, *, key: str = "", **how: Any) -> T:
    """Declares an argument, as `option` declares an option."""
    return _declared(default, typer.Argument(**how), key)


def _declared(default: T, parameter: object, key: str, names: tuple[str, ...] = ()) -> T:
    value = MISSING if default is REQUIRED else default
    return cast(T, field(default=value, metadata={_PARAMETER: parameter, _KEY: key, _NAMES: names}))


def with_options(kind: type[T]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the parameters that `kind` declares. The command takes `options` of that
    kind, and may also take a typer.Context.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            context = {name: given[name] for name in others}
            command(**context, options=build_options(kind, given))

        hints = get_type_hints(command)
        others = [name for name in inspect.signature(command).parameters if name != "options"]
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
            for name in others
        ]
        run.__annotations__ = {}
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*parameters, *(flag.parameter() for flag in _flags(kind))]
        )
        return run

    return decorate


def settings(options: object) -> dict[str, object]:
    """Returns {key: value} for the given options that set a configuration key."""
    return {flag.key: value for flag, value in _given(options)}


def setting_keys(kind: type) -> dict[str, str]:
    """Returns the configuration keys that options of this kind set: {option: key}."""
    return {flag.field.name: flag.key for flag in _flags(kind) if flag.key}


def setting_flags(options: object) -> tuple[str, ...]:
    """Returns the same options as on a command line: ("--num-pages", "9")."""
    words: list[str] = []
    for flag, value in _given(options):
        for item in value if isinstance(value, list) else [value]:
            words += [flag.name] if item is True else [flag.name, str(item)]
    return tuple(words)


def option_values(options: object) -> dict[str, object]:
    """Returns the options, with those of its groups, by name."""
    return {flag.field.name: value for flag, value in _values(options)}


@dataclass(frozen=True, slots=True)
class _Flag:
    """A field of a dataclass of options, with its resolved type."""

    field: Field[Any]
    kind: Any

    @property
    def key(self) -> str:
        return str(self.field.metadata[_KEY])

    @property
    def name(self) -> str:
        own = f"--{self.field.name.replace('_', '-')}"
        return next((name for name in self.field.metadata[_NAMES] if name.startswith("--")), own)

    def parameter(self) -> inspect.Parameter:
        default = self.field.default
        return inspect.Parameter(
            self.field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=Annotated[self.kind, self.field.metadata[_PARAMETER]],
        )


def _flags(kind: type) -> Iterator[_Flag]:
    hints = get_type_hints(kind)
    for each in fields(kind):
        hint = hints[each.name]
        if is_dataclass(hint):
            yield from _flags(cast(type, hint))
        else:
            yield _Flag(each, hint)


def build_options(kind: type[T], given: Mapping[str, Any]) -> T:
    """Builds options, with those of its groups, from values by name; others get their default."""
    hints = get_type_hints(kind)
    values = {}
    for each in fields(cast(Any, kind)):
        if is_dataclass(hints[each.name]):
            values[each.name] = build_options(hints[each.name], given)
        elif each.name in given:
            values[each.name] = given[each.name]
    return kind(**values)


def _values(options: object) -> Iterator[tuple[_Flag, Any]]:
    for each in fields(cast(Any, options)):
        value = getattr(options, each.name)
        if is_dataclass(value):
            yield from _values(value)
        else:
            yield _Flag(each, None), value


def _given(options: object) -> Iterator[tuple[_Flag, Any]]:
    for flag, value in _values(options):
        if flag.key and value not in (None, [], ()):
            yield flag, value
