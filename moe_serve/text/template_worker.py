"""The process that renders chats with one template.

    python -m moe_serve.text.template_worker

    server -- order --> child of this process -- reply --> server
                          | ended by its timer, or without memory
                          v
                        this process replies in its place, and forks the next child

Memory has a limit (RLIMIT_AS), and each child has a time limit: a timer of the kernel, which also
ends a single expression that does not return. A fork takes a millisecond, so ending a child does
not delay the next chat. Both processes end when standard input does. There is only one thread,
because it forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from moe_serve.child_python import receive_frame, send_frame
from moe_serve.text.template_frames import Kind, Order, Reply, Setup
from moe_serve.text.template_limits import DEADLINE, LimitedEnvironment, TemplateTimeoutError


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
    """Writes JSON without the HTML escapes of Jinja's own filter, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def chat_environment() -> LimitedEnvironment:
    """Makes an environment with the filters, globals and extensions that chat templates expect."""
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


_MAX_COMPILE_SECONDS = 5.0
_SECONDS_BEFORE_KILL = 0.05  # beyond the limit that loops and macros check
_MAX_MESSAGE_CHARS = 1000
_INPUT_ENDED, _FAILED, _HAS_GROWN = 0, 1, 2  # exit codes of a child
_MARK = "(the last message ends here)"


class TooLongError(Exception):
    """The template printed more characters than allowed."""


def main() -> int:
    """Answers one order after the other until standard input ends."""
    # meant for the server, which may still be finishing requests
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    content = receive_frame(0)
    if content is None:
        return 0
    setup = Setup.decode(content)
    _limit_memory(setup.max_bytes)
    template = _compiled(setup)
    if template is None:
        return 1
    while True:
        child = os.fork()
        if child == 0:
            os._exit(_serve(template, setup))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == _INPUT_ENDED:
            return 0
        if status != _HAS_GROWN:
            kind = Kind.LATE if status == -signal.SIGALRM else Kind.LARGE
            send_frame(1, Reply(kind).encode())


def _serve(template: Template, setup: Setup) -> int:
    """Runs the child: answer orders until one takes much memory, which is freed with the
    process."""
    base = _address_space()
    try:
        while (content := receive_frame(0)) is not None:
            send_frame(1, _answer(template, setup, content).encode())
            if _address_space() - base > setup.max_bytes // 4:
                return _HAS_GROWN
    except (MemoryError, BrokenPipeError):
        return _FAILED
    return _INPUT_ENDED


def _limit_memory(max_bytes: int) -> None:
    """Limits the address space, also of children, to the current size plus `max_bytes`."""
    base = _address_space()
    limits = {
        resource.RLIMIT_AS: base + max_bytes if base else resource.RLIM_INFINITY,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
    }
    for kind, limit in limits.items():
        # some systems have no such limit; time is limited too
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def _address_space() -> int:
    """Returns the bytes of this process's address space; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _compiled(setup: Setup) -> Template | None:
    """Compiles the template and tells the server whether it succeeded; returns the template."""
    signal.setitimer(signal.ITIMER_REAL, _MAX_COMPILE_SECONDS)
    template, reply = None, Reply(Kind.READY)
    try:
        template = chat_environment().from_string(setup.source)
    except TemplateError as error:
        reply = Reply(Kind.INVALID, _shown(error))
    except (RecursionError, MemoryError) as error:
        reply = Reply(Kind.INVALID, f"compiling it ends with {type(error).__name__}")
    signal.setitimer(signal.ITIMER_REAL, 0)
    send_frame(1, reply.encode())
    return template


def _answer(template: Template, setup: Setup, content: bytes) -> Reply:
    """Returns the reply to one order, whatever the template raises."""
    signal.setitimer(signal.ITIMER_REAL, setup.max_seconds + _SECONDS_BEFORE_KILL)
    DEADLINE.set(time.monotonic() + setup.max_seconds)
    try:
        return _rendered(template, setup, Order.decode(content))
    except TemplateTimeoutError:
        return Reply(Kind.LATE)
    except TooLongError:
        return Reply(Kind.LONG)
    except MemoryError:
        return Reply(Kind.LARGE)
    except TemplateRefusedError as error:
        return Reply(Kind.REFUSED, _shown(error))
    except Exception as error:  # a template is foreign code and can raise anything
        return Reply(Kind.FAILED, f"{type(error).__name__}: {_shown(error)}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _rendered(template: Template, setup: Setup, order: Order) -> Reply:
    text = _render(template, setup, order, order.messages)
    if not order.continues:
        return Reply(Kind.TEXT, text)
    # Text that the template writes after the last message is found by appending a mark to the
    # message's content. Searching for the content itself would find a "<" in the "<|im_end|>" after
    # it.
    last = order.messages[-1]
    marked = {**last, "content": last["content"] + _MARK}
    marked_text = _render(template, setup, order, [*order.messages[:-1], marked])
    _, mark, behind = marked_text.rpartition(_MARK)
    if not (mark and text.endswith(behind)):
        return Reply(Kind.HIDDEN)
    return Reply(Kind.TEXT, text.removesuffix(behind))


def _render(template: Template, setup: Setup, order: Order, messages: list[dict[str, Any]]) -> str:
    context: Mapping[str, Any] = {
        **order.options,
        **setup.special_tokens,
        "messages": messages,
        "add_generation_prompt": order.add_generation_prompt,
        "tools": order.tools,
        "documents": None,
    }
    pieces: list[str] = []
    num_chars = 0
    for piece in template.generate(context):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > setup.max_chars:
            raise TooLongError
        if time.monotonic() > DEADLINE.get():
            raise TemplateTimeoutError
    return "".join(pieces)


def _shown(error: Exception) -> str:
    return str(error)[:_MAX_MESSAGE_CHARS]


if __name__ == "__main__":
    sys.exit(main())
