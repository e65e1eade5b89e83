"""Converts the answer to output items, and to the events of a stream.

One item is open at a time; the next one closes it:

    reasoning      output_item.added  content_part.added  reasoning_text.delta...       (done: 3)
    message        output_item.added  content_part.added  output_text.delta...          (done: 3)
    function_call  output_item.added                      function_call_arguments.delta (done: 2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from moe_serve.http.openai.responses.input_items import Item, new_id
from moe_serve.text.assistant.outbox import AssistantDelta, CallDelta

Event = dict[str, Any]
Logprobs = Sequence[Mapping[str, Any]]
Status = Literal["completed", "incomplete"]


class OutputItems:
    """Takes deltas and returns events. `items` has the finished items."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: _OpenItem | None = None
        self._waiting: list[Mapping[str, Any]] = []
        self._call_index = -1

    def push(self, delta: AssistantDelta, logprobs: Logprobs = ()) -> list[Event]:
        """Returns the events for one delta. `logprobs` belong to its tokens; only messages keep
        them.

        A token may add no text. Before the first item its logprobs wait for the item that it
        begins; within a call or reasoning they are dropped.
        """
        events: list[Event] = []
        # the rest of an open call comes first, because text would close its item
        begun = self._call_index
        for call in delta.calls:
            if call.index == begun:
                events += self._call(call)
        if delta.reasoning:
            events += self._text("reasoning", delta.reasoning, ())
        if delta.content:
            events += self._text("message", delta.content, [*self._waiting, *logprobs])
        elif logprobs and not (delta.reasoning or delta.calls):
            if self._open is None:
                self._waiting += logprobs
            elif isinstance(self._open, _OpenText) and self._open.kind == "message":
                events.append(self._open.add("", logprobs))
        for call in delta.calls:
            if call.index != begun:
                events += self._call(call)
        if self._open is not None:
            self._waiting = []
        return events

    def finish(self, status: Status) -> list[Event]:
        """Closes the open item. An answer without items gets an empty message."""
        events: list[Event] = []
        if self._open is None and not self.items:
            if self._waiting:
                events += self._text("message", "", self._waiting)
            else:
                events += self._begin(_OpenText("message", 0))
        return events + self._end(status)

    def snapshot(self) -> list[Item]:
        """Returns the items so far. An open item is shown as incomplete."""
        if self._open is None:
            return list(self.items)
        return [*self.items, self._open.ended("incomplete")]

    def _text(
        self, kind: Literal["message", "reasoning"], text: str, logprobs: Logprobs
    ) -> list[Event]:
        events: list[Event] = []
        opened = self._open
        if not (isinstance(opened, _OpenText) and opened.kind == kind):
            events += self._end("completed")
            opened = _OpenText(kind, len(self.items))
            events += self._begin(opened)
        return [*events, opened.add(text, logprobs)]

    def _call(self, delta: CallDelta) -> list[Event]:
        events: list[Event] = []
        if delta.index != self._call_index:
            assert delta.index == self._call_index + 1, "calls come one after the other"
            assert delta.id is not None and delta.name is not None, (
                "a call begins with its id and name"
            )
            self._call_index = delta.index
            events += self._end("completed")
            events += self._begin(_OpenCall(delta.id, delta.name, len(self.items)))
        assert isinstance(self._open, _OpenCall), "text does not interrupt a call"
        if delta.arguments:
            events.append(self._open.add(delta.arguments))
        return events

    def _begin(self, opened: _OpenItem) -> list[Event]:
        self._open = opened
        return opened.begin()

    def _end(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        events, item = self._open.end(), self._open.ended(status)
        index = len(self.items)
        self.items.append(item)
        self._open = None
        done = {"type": "response.output_item.done", "output_index": index, "item": item}
        return [*events, done]


class _OpenText:
    """An open message or reasoning item with one text part."""

    def __init__(self, kind: Literal["message", "reasoning"], output_index: int) -> None:
        self.kind = kind
        self._is_message = kind == "message"
        self._id = new_id("msg" if self._is_message else "rs")
        self._place = {"item_id": self._id, "output_index": output_index, "content_index": 0}
        self._output_index = output_index
        self._texts: list[str] = []
        self._logprobs: list[Mapping[str, Any]] = []

    def begin(self) -> list[Event]:
        item = {**self._head("in_progress"), "content": []}
        added = {"type": "response.output_item.added", "output_index": self._output_index}
        part = {"type": "response.content_part.added", **self._place, "part": self._part()}
        return [{**added, "item": item}, part]

    def add(self, text: str, logprobs: Logprobs) -> Event:
        self._texts.append(text)
        if not self._is_message:
            return {"type": "response.reasoning_text.delta", **self._place, "delta": text}
        self._logprobs += logprobs
        event = {"type": "response.output_text.delta", **self._place, "delta": text}
        return {**event, "logprobs": list(logprobs)}

    def end(self) -> list[Event]:
        text = "".join(self._texts)
        kind = "output_text" if self._is_message else "reasoning_text"
        done: Event = {"type": f"response.{kind}.done", **self._place, "text": text}
        if self._is_message:
            done["logprobs"] = list(self._logprobs)
        part = {"type": "response.content_part.done", **self._place, "part": self._part()}
        return [done, part]

    def ended(self, status: Status) -> Item:
        return {**self._head(status), "content": [self._part()]}

    def _head(self, status: str) -> Item:
        if self._is_message:
            return {"id": self._id, "type": "message", "role": "assistant", "status": status}
        return {"id": self._id, "type": "reasoning", "summary": [], "status": status}

    def _part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        if not self._is_message:
            return {"type": "reasoning_text", "text": text}
        logprobs = list(self._logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class _OpenCall:
    """An open function call."""

    def __init__(self, call_id: str, name: str, output_index: int) -> None:
        self._call_id, self._name = call_id, name
        self._id = new_id("fc")
        self._place = {"item_id": self._id, "output_index": output_index}
        self._output_index = output_index
        self._arguments: list[str] = []

    def begin(self) -> list[Event]:
        item = self._item("in_progress")
        added = {"type": "response.output_item.added", "output_index": self._output_index}
        return [{**added, "item": item}]

    def add(self, arguments: str) -> Event:
        self._arguments.append(arguments)
        kind = "response.function_call_arguments.delta"
        return {"type": kind, **self._place, "delta": arguments}

    def end(self) -> list[Event]:
        done = {"type": "response.function_call_arguments.done", **self._place}
        return [{**done, "name": self._name, "arguments": "".join(self._arguments)}]

    def ended(self, status: Status) -> Item:
        return self._item(status)

    def _item(self, status: str) -> Item:
        return {
            "id": self._id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
            "status": status,
        }


_OpenItem = _OpenText | _OpenCall
