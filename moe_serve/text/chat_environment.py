"""The Jinja environment of chat templates: the same names as in `transformers`, sandboxed.

A template is code from a checkpoint. It sees immutable data, no attribute that starts with an
underscore, and no file or module.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from moe_serve.text.template_limits import LimitedEnvironment


class TemplateRefusedError(TemplateError):
    """The template itself refused the messages, by calling `raise_exception`."""


class GenerationTag(Extension):
    """Implements `{% generation %} ... {% endgeneration %}`, which marks the assistant's text for
    training.

    It has no meaning when serving: the block is rendered as if the tags were not there.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateDict:
    """The `dict(...)` of templates, without the attributes of the type `dict`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """A `namespace(...)` that refuses names with a leading underscore.

    The constructor names no argument, so that a template may set any name, also `self`.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template must not store the attribute {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusedError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the HTML escapes of Jinja's own filter, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def chat_environment() -> LimitedEnvironment:
    """Make an environment with the filters, globals and extensions that chat templates expect."""
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    names: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    environment.globals.update(names)
    environment.limit_filters()
    return environment
