"""Generates the page of the command line: every command with its arguments and options."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import Any, get_args

import typer.core
import typer.main

from moe_serve.cli.main import app

INTRODUCTION = """\
# The command line

`moe-serve COMMAND --help` shows the same. Exit codes: 0 success; 1 the server was not reached,
or something failed; 2 a mistake in the command, which one sentence describes; 130 interrupted.
"""
_NAMES = {"str": "text", "int": "number", "float": "number", "bool": "", "Path": "path"}
HIDDEN = frozenset({"help", "install_completion", "show_completion"})
Command = typer.core.TyperCommand | typer.core.TyperGroup


def commands(command: Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Returns the command and those below it, in the order of `--help`."""
    yield path, command
    if isinstance(command, typer.core.TyperGroup):
        for name, below in command.commands.items():
            assert isinstance(below, Command), f"{name} is not a typer command"
            yield from commands(below, (*path, name))


def render() -> str:
    root = typer.main.get_group(app)
    assert isinstance(root, typer.core.TyperGroup), "the program is a group of commands"
    parts = [INTRODUCTION]
    for path, command in commands(root, ("moe-serve",)):
        if not command.hidden:
            parts.append(_section(path, command))
    return "\n".join(parts)


def _section(path: tuple[str, ...], command: Command) -> str:
    lines = [f"{'#' * min(len(path) + 1, 4)} {' '.join(path)}", ""]
    lines += [_plain(command.help or ""), ""]
    arguments = [p for p in command.params if isinstance(p, typer.core.TyperArgument)]
    options = [
        p
        for p in command.params
        if isinstance(p, typer.core.TyperOption) and p.name not in HIDDEN and not p.hidden
    ]
    usage = [*path, *(["[OPTIONS]"] if options else []), *map(_usage, arguments)]
    if isinstance(command, typer.core.TyperGroup):
        usage.append("COMMAND [ARGS]...")
    lines += [f"    {' '.join(usage)}", ""]
    if arguments:
        lines += ["| argument | |", "|---|---|"]
        lines += [f"| `{_usage(a)}` | {_plain(a.help or '')} |" for a in arguments]
        lines.append("")
    if options:
        lines += ["| option | takes | default | |", "|---|---|---|---|"]
        lines += [_option(option) for option in options]
        lines.append("")
    return "\n".join(lines)


def _usage(argument: typer.core.TyperArgument) -> str:
    name = (argument.metavar or str(argument.name)).upper().strip("[]")
    many = "..." if argument.nargs != 1 else ""
    return f"{name}{many}" if argument.required else f"[{name}{many}]"


def _option(option: typer.core.TyperOption) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    takes = "" if option.is_flag else _kind(option)
    default = option.default
    is_shown = default not in (None, False, (), "") and not callable(default)
    shown = f"`{default}`" if is_shown and not str(default).startswith("Sentinel") else ""
    return f"| {names} | {takes} | {shown} | {_plain(option.help or '')} |"


def _kind(option: typer.core.TyperOption) -> str:
    if option.metavar:
        return option.metavar.lower()
    annotation = _annotation(option)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return ", ".join(f"`{choice.value}`" for choice in annotation)
    choices = [c for c in get_args(annotation) if not isinstance(c, type)]
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    inner = next((c for c in get_args(annotation) if c is not type(None)), annotation)
    name = getattr(inner, "__name__", str(inner))
    return _NAMES.get(name, name) + (" (may be repeated)" if option.multiple else "")


def _annotation(option: typer.core.TyperOption) -> Any:
    """Returns the option's Python type; before typer 0.29, only the name of click's type."""
    descriptor = getattr(option, "type_descriptor", None)
    if descriptor is not None:
        return descriptor.annotation
    return getattr(getattr(option, "type", None), "name", "text")


def _plain(text: str) -> str:
    """Returns one line of Markdown without the markup of rich or HTML."""
    text = re.sub(r"\s+", " ", text.replace("\b", " ")).strip()
    text = re.sub(r"\[/?(?:bold|dim|italic|red|green|cyan|yellow)\]", "", text)
    return text.replace("|", "\\|").replace("<", "&lt;")
