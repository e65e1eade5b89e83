"""A sandbox in which no single expression makes a giant value, and no loop runs for ever.

The renderer counts a template's printed text piece by piece. It would not see the value of one
expression ("x" * 10**10), or a loop that prints nothing. So operators, methods and filters that can
make large values from small ones check the size first, and every loop iteration and macro call
checks the clock.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_ITEMS = 8 * 1024 * 1024  # characters of a text, or items of a list
_MAX_WIDTH = 100_000  # limit of any number passed to a method or filter: widths, counts
_MAX_POWER_BITS = 4096
_TICK = "template_tick"
_WIDE = re.compile(r"\d{6}")
_WIDTH_FROM_VALUE = re.compile(r"%[^a-zA-Z%]*\*|:[^{}]*\{")

DEADLINE: ContextVar[float] = ContextVar("the end of the rendering in time.monotonic()")


class TemplateTimeoutError(Exception):
    """A loop or a macro ran past DEADLINE."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The immutable sandbox with limits of size and time."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals[_TICK] = _tick

    def limit_filters(self) -> None:
        """Adds limits to all filters; call it after all filters are registered."""
        for name, function in self.filters.items():
            self.filters[name] = _limited(name, function)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes):
            _check_call(__obj.__name__, (owner, *args), kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns Jinja's replacement of `format`, wrapped: it is a function without an owner to
        inspect.
        """
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_call(value.__name__, (value.__self__, *args), kwargs)
            return wrapped(*args, **kwargs)

        return checked

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Watched().visit(super()._parse(source, name, filename))
        return tree


class _Watched(NodeTransformer):
    """Adds a clock check to every loop and macro, and turns `a ~ b` into a checked sum."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        texts = [nodes.Filter(part, "string", [], [], None, None) for part in node.nodes]
        whole: nodes.Expr = texts[0]
        for text in texts[1:]:
            whole = nodes.Add(whole, text)
        return whole

    def _with_tick(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node


def _tick() -> None:
    if time.monotonic() > DEADLINE.get():
        raise TemplateTimeoutError


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps Jinja's mark of functions that get the environment first
    def call(*args: Any, **kwargs: Any) -> Any:
        is_given_first = hasattr(function, "jinja_pass_arg")
        _check_call(name, args[1:] if is_given_first else args, kwargs)
        return function(*args, **kwargs)

    return call


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() * max(0, right), _MAX_POWER_BITS, "a power")
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str | bytes | list | tuple) and isinstance(times, int):
                _check_size(len(many) * max(0, times), MAX_ITEMS, "a repetition")
        if isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() + right.bit_length(), _MAX_POWER_BITS, "a product")
    elif operator == "+" and isinstance(left, str | list | tuple) and hasattr(right, "__len__"):
        _check_size(len(left) + len(right), MAX_ITEMS, "a sum")
    elif operator == "%" and isinstance(left, str):
        _check_format(left, (right,))


def _check_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks a call. `args[0]` is the method's owner or the filter's input."""
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, int):
            _check_size(abs(value), _MAX_WIDTH, f"a number for {name}")
    if not args:
        return
    if name in ("format", "format_map") and isinstance(args[0], str):
        _check_format(args[0], (*args[1:], *kwargs.values()))
    elif name == "replace" and len(args) >= 3:
        text, old, new = (str(value) for value in args[:3])
        _check_size(len(text) + text.count(old) * len(new), MAX_ITEMS, "a replacement")
    elif name == "join":
        _check_size(_joined_size(args), MAX_ITEMS, "what is joined")
    elif name in ("indent", "wordwrap") and isinstance(args[0], str):
        widths = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, int)]
        lines = args[0].count("\n") + 1
        _check_size(len(args[0]) + lines * max(widths, default=4), MAX_ITEMS, "an indentation")


def _joined_size(args: tuple[Any, ...]) -> int:
    """Returns the size of "x".join(items) or items | join("x").

    Iterators, which can be read only once, count as small: the values behind them were checked.
    """
    groups = [arg for arg in args if isinstance(arg, list | tuple)]
    separator = max((len(arg) for arg in args if isinstance(arg, str)), default=0)
    return sum(_size_of(group, separator) for group in groups)


def _size_of(items: Iterable[Any], separator: int) -> int:
    return sum(separator + (len(item) if isinstance(item, str) else 8) for item in items)


def _check_format(pattern: str, values: tuple[Any, ...]) -> None:
    """Checks a format's widths, which come from the pattern, or with * and {} from the values."""
    flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    is_wide = any(isinstance(value, int) and abs(value) > _MAX_WIDTH for value in flat)
    if _WIDE.search(pattern) or (is_wide and _WIDTH_FROM_VALUE.search(pattern)):
        raise SecurityError("a format with such a width is not allowed in a template")


def _check_size(size: int, limit: int, what: str) -> None:
    if size > limit:
        raise SecurityError(f"{what} of {size} is over the template's limit of {limit}")
