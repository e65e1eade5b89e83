"""Holds parsed pieces of a message until they are handed out, as additions to the message."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """The new part of tool call `index` of the message.

    `id` and `name` come once, with the call's first delta; `arguments` is the new part of the JSON
    text. A later index never begins before the previous call has ended.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantDelta:
    """New text of the message, in the order reasoning, content, calls.

    The rest of a call that began in an earlier delta comes before all of these.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.calls)


NOTHING = AssistantDelta()


def joined(first: AssistantDelta, second: AssistantDelta) -> AssistantDelta:
    """Combines two deltas into one."""
    if first.is_empty:
        return second
    if second.is_empty:
        return first
    return AssistantDelta(
        content=first.content + second.content,
        reasoning=first.reasoning + second.reasoning,
        calls=first.calls + second.calls,
    )


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class HeldSpace:
    """Passes text on, but holds trailing white space back until more text follows."""

    def __init__(self, sink: Callable[[str], object]) -> None:
        self._sink = sink
        self._held: list[str] = []

    def push(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self.flush()
            self._sink(body)
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def flush(self) -> None:
        for space in self._held:
            self._sink(space)
        self._held = []

    def drop(self) -> None:
        self._held = []


class Outbox:
    """Collects content, reasoning and calls; `take` returns them as one delta.

    White space between content and a call, and after a call, is layout and is dropped. Calls beyond
    `max_calls` are dropped too. `has_calls_only`: the answer is forced to be calls, so text that
    looks like content is the beginning of a cut marker.

    `has_cut_call`: the text was cut within a call, or within the markup that begins one.
    """

    def __init__(
        self,
        make_id: Callable[[], str] = new_call_id,
        max_calls: int | None = None,
        *,
        has_calls_only: bool = False,
    ) -> None:
        self._make_id = make_id
        self._max_calls = max_calls
        self._has_calls_only = has_calls_only
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallDelta] = []
        self._arguments: list[str] = []
        self._tail = HeldSpace(self._content.append)
        self._num_calls = 0
        self.is_after_call = False  # and only white space has come since
        self._of_call: list[str] = []  # arguments of the call that began last
        self.has_spoilt_call = False
        self.has_cut_call = False

    def content(self, text: str) -> None:
        if self._has_calls_only:
            return
        if self.is_after_call:
            text = text.lstrip()
            self.is_after_call = not text
        if text:
            self._tail.push(text)

    def spoilt_call(self, text: str) -> None:
        """Adds content that begins like a call but is not one."""
        self.has_spoilt_call = True
        self.content(text)

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        self._tail.drop()
        self._num_calls += 1
        self._of_call = []
        if not self._is_dropped:
            call_id = call_id or self._make_id()
            self._calls.append(CallDelta(index=self._num_calls - 1, id=call_id, name=name))

    def arguments(self, text: str) -> None:
        """Adds arguments of the call that began last."""
        if text:
            self._of_call.append(text)
        if text and not self._is_dropped:
            self._arguments.append(text)

    def end_call(self, *, is_cut: bool = False) -> None:
        """Ends a call.

        A call without arguments gets an empty object, so that it is JSON. A cut call keeps the
        arguments received so far.
        """
        if is_cut:
            self.has_cut_call = not (self._is_dropped or _is_object("".join(self._of_call)))
        elif not self._of_call:
            self.arguments("{}")
        self._close_arguments()
        self.is_after_call = True

    def cut_head(self) -> None:
        """Notes that the text was cut before a call's name was known; the fragment is no call."""
        self.has_cut_call = self.has_spoilt_call = True

    def flush(self) -> None:
        """Releases held text because no more will come."""
        self._tail.flush()

    def take(self) -> AssistantDelta:
        """Returns everything since the last call."""
        self._close_arguments()
        if not (self._content or self._reasoning or self._calls):
            return NOTHING
        delta = AssistantDelta(
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            calls=tuple(self._calls),
        )
        self._content.clear()
        self._reasoning.clear()
        self._calls.clear()
        return delta

    @property
    def _is_dropped(self) -> bool:
        return self._max_calls is not None and self._num_calls > self._max_calls

    def _close_arguments(self) -> None:
        """Combines the collected arguments of one call into one delta,
        with the name if it is new.
        """
        if not self._arguments:
            return
        text, index = "".join(self._arguments), self._num_calls - 1
        self._arguments.clear()
        if self._calls and self._calls[-1].index == index:
            last = self._calls.pop()
            call = CallDelta(
                index=index, id=last.id, name=last.name, arguments=last.arguments + text
            )
        else:
            call = CallDelta(index=index, arguments=text)
        self._calls.append(call)


def _is_object(text: str) -> bool:
    """Returns whether arguments are complete."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
