"""Options that take several files, as a shell's `*` writes them: --load a.json b.json c.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

# A context is click's, or typer's own copy of it, by typer's version.
_FLAGS = ("--trace", "--load", "--plan")


def spread(arguments: Sequence[str]) -> list[str]:
    """Repeats the flag for each file: ["--load", "a", "b", "--out", "c"] becomes ["--load", "a",
    "--load", "b", "--out", "c"]."""
    found, flag = list[str](), ""
    for argument in arguments:
        if argument.startswith("-"):
            flag = argument if argument in _FLAGS else ""
        elif flag and found[-1] != flag:
            found.append(flag)
        found.append(argument)
    return found


class ManyFilesCommand(TyperCommand):
    """A command with options that take several files."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args))


class ManyFilesGroup(TyperGroup):
    """A command group whose own options take several files. Its subcommands are named before any
    option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_own = not args or args[0].startswith("-")
        return super().parse_args(ctx, spread(args) if is_own else args)
