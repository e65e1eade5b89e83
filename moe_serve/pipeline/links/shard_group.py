"""The links between the shards of one attention rank, and their exchanges in a step.

Every shard has a link to every other. The first one leads: it alone knows when a step begins, and
when it must be abandoned. A frame begins with a header of 64 bytes that states its kind.

    leader -> others   orders, the experts' sums, its columns: one sequence, numbered without end
    others -> anyone   their columns, numbered from the step's beginning

A shard that begins the next exchange among all shards has received every other shard's columns of
the last one, so all shards have read the messages before it; a link's memory is reused after eight
messages. Messages sent to the leader alone are not answered, so six such exchanges may follow each
other, and steps have at most four (`MAX_MICRO_BATCHES`), at their end.

The two transports share the experts' sums inside an attention rank: the first shard receives them
and sends them on.

T rows, N columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_serve.errors import MoeServeError
from moe_serve.model.stage.attention_stage import Routed
from moe_serve.model.stage.tensor_shard import TensorShard
from moe_serve.pipeline.links.shared_link import SharedLink
from moe_serve.pipeline.links.transfer import PeerLostError
from moe_serve.pipeline.transport import Transport

_HEADER_BYTES = 64
_DATA, _ORDER, _ABANDON = 1, 2, 3
_SIZE_BYTES = 8
_SLOTS = 8
_OTHERS = 1 << 31  # tags of messages from shards other than the leader
_PATIENCE_S = 3600.0  # seconds between two checks; a lost leader closes the link
_STEPS, _EXCHANGES = 1 << 10, 1 << 17


class ShardLostError(MoeServeError):
    """Another shard of this attention rank is lost, and with it the whole rank."""


class StepAbandonedError(MoeServeError):
    """The leader abandons this step; its exchanged data is void."""


class ShardGroup:
    """Implements Gather for one shard. `links`: keyed by the other shards' numbers."""

    def __init__(self, name: str, shard: TensorShard, links: Mapping[int, SharedLink]) -> None:
        assert set(links) == set(range(shard.count)) - {shard.index}, f"links to {sorted(links)}"
        self._name, self.shard = name, shard
        # the leader comes first: its error message is the most useful
        self._links = dict(sorted(links.items()))
        self._num_led = 0  # messages sent by the leader so far
        self._step, self._num_exchanges = 0, 0
        self._num_unanswered = 0  # messages sent to the leader that it may not have read yet
        self._is_abandoned = False  # and the other shards have not yet confirmed it

    @property
    def is_leader(self) -> bool:
        return self.shard.index == 0

    def has_message(self, index: int, timeout_s: float) -> bool:
        """Waits for a message from another shard, or for its end;
        returns False after the time-out.
        """
        return self._links[index].has_message(timeout_s)

    def close(self) -> None:
        """Closes all links, which wakes and ends shards that wait for this one."""
        for link in self._links.values():
            link.close()
        self._links = {}

    # Methods of all shards.

    def everywhere(self, part_TN: Tensor, widths: tuple[int, ...]) -> Tensor:
        """See `Gather.everywhere`."""
        led, own = self._next_led(), self._next_exchange()
        frame = _frame_of(part_TN)
        for index in self._links:
            self._send(index, frame, led if self.is_leader else own)
        out_TN = self._joined(part_TN, widths, led, own)
        self._num_unanswered = 1  # this message
        return out_TN

    def at_leader(self, part_TN: Tensor, widths: tuple[int, ...]) -> Tensor:
        """See `Gather.at_leader`."""
        own = self._next_exchange()
        if self.is_leader:
            return self._joined(part_TN, widths, 0, own)
        self._num_unanswered += 1
        assert self._num_unanswered < _SLOTS, (
            f"{self._num_unanswered} messages to a leader that has answered none of them, and the "
            f"link's memory is used again after {_SLOTS}"
        )
        self._send(0, _frame_of(part_TN), own)
        return part_TN

    def _joined(self, part_TN: Tensor, widths: tuple[int, ...], led: int, own: int) -> Tensor:
        num_rows = len(part_TN)
        out_TN = part_TN.new_empty(num_rows, sum(widths))
        starts = [sum(widths[:index]) for index in range(len(widths))]
        for index in range(len(widths)):
            columns = out_TN[:, starts[index] : starts[index] + widths[index]]
            if index == self.shard.index:
                columns.copy_(part_TN)
            else:
                shape = (num_rows, widths[index])
                tag = led if index == 0 else own
                columns.copy_(self._receive(index, tag, shape, part_TN.dtype))
        return out_TN

    # Methods of the leader.

    def order(self, content: bytes) -> None:
        """Sends the others their next order: a step or any other content."""
        if self._is_abandoned:
            self._is_abandoned = False
            for index in self._links:
                self._take(index, torch.empty(_HEADER_BYTES, dtype=torch.uint8), self._tag(0))
        self._begin_step()
        size = len(content).to_bytes(_SIZE_BYTES, "little")
        self._lead(_header(_ORDER, size))
        self._lead(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def share(self, rows_TN: Tensor) -> None:
        """Sends the others rows that only the leader has."""
        self._lead(_frame_of(rows_TN))

    def abandon(self) -> None:
        """Makes the others leave the step, wherever they are in it; a step that has ended is not
        affected.
        """
        self._lead(_header(_ABANDON))
        self._is_abandoned = True

    def _lead(self, frame: Tensor) -> None:
        tag = self._next_led()
        for index in self._links:
            self._send(index, frame, tag)

    # Methods of the other shards.

    def next_order(self) -> bytes:
        """Waits for the leader's next order, for as long as the leader lives."""
        while True:
            while not self._links[0].has_message(_PATIENCE_S):
                continue
            header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
            self._take(0, header, self._next_led())
            if int(header[0]) == _ABANDON:  # an abandoned step that has already ended here
                self._send(0, _header(_ABANDON), self._tag(0))
                continue
            assert int(header[0]) == _ORDER, (
                f"the leader sent a frame of kind {int(header[0])} instead of an order"
            )
            size = int.from_bytes(bytes(header[1 : 1 + _SIZE_BYTES].tolist()), "little")
            content = torch.empty(size, dtype=torch.uint8)
            self._take(0, content, self._next_led())
            self._begin_step()
            return content.numpy().tobytes()

    def shared(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Receives the rows that the leader shares; raises StepAbandonedError."""
        rows_TN = self._receive(0, self._next_led(), tuple(shape), dtype)
        self._num_unanswered = 0
        return rows_TN

    def _begin_step(self) -> None:
        """Drops messages of an abandoned step that are still on their way, so that none is read in
        this one.
        """
        self._step, self._num_exchanges = (self._step + 1) % _STEPS, 0
        self._num_unanswered = 0
        for index, link in self._links.items():
            if index != 0:
                link.forget(self._is_stale)

    def _is_stale(self, tag: int) -> bool:
        return (tag & ~_OTHERS) // (_EXCHANGES << 4) != self._step

    def _receive(self, index: int, tag: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = dtype.itemsize * int(torch.Size(shape).numel())
        frame = torch.empty(_HEADER_BYTES + size, dtype=torch.uint8)
        self._take(index, frame, tag)
        if int(frame[0]) == _ABANDON:
            self._send(0, _header(_ABANDON), self._tag(0))
            raise StepAbandonedError(f"{self._name} abandons the step")
        kind = int(frame[0])
        assert kind == _DATA, f"shard {index} sent a frame of kind {kind} instead of data"
        return frame[_HEADER_BYTES:].view(dtype).view(shape)

    @torch.inference_mode()  # as in a step: a link's memory is written to in both
    def _send(self, index: int, frame: Tensor, tag: int) -> None:
        try:
            self._links[index].send(frame, tag, "its part of a layer").wait()
        except PeerLostError as error:
            raise ShardLostError(str(error)) from None

    @torch.inference_mode()
    def _take(self, index: int, frame: Tensor, tag: int) -> None:
        try:
            self._links[index].receive(frame, tag, "its part of a layer").wait()
        except PeerLostError as error:
            raise ShardLostError(str(error)) from None

    def _next_led(self) -> int:
        self._num_led += 1
        number = self._num_led % (_STEPS * _EXCHANGES)
        return number << 4 | number % _SLOTS

    def _next_exchange(self) -> int:
        number = self._num_exchanges = self._num_exchanges + 1
        assert number < _EXCHANGES, f"{number} exchanges in a step"
        return self._tag(number)

    def _tag(self, number: int) -> int:
        """Returns the tag of a message from another shard than the leader; 0 says that it has left
        the step.
        """
        return _OTHERS | (self._step * _EXCHANGES + number) << 4 | number % _SLOTS


def _header(kind: int, rest: bytes = b"") -> Tensor:
    header = bytes([kind]) + rest
    return torch.frombuffer(bytearray(header.ljust(_HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _frame_of(part_TN: Tensor) -> Tensor:
    content = part_TN.contiguous().view(-1).view(torch.uint8) if part_TN.numel() else None
    size = 0 if content is None else len(content)
    frame = torch.empty(_HEADER_BYTES + size, dtype=torch.uint8)
    frame[0] = _DATA
    if content is not None:
        frame[_HEADER_BYTES:] = content
    return frame


class LeaderTransport:
    """Implements Transport for the first shard: it forwards another transport's sums."""

    def __init__(self, transport: Transport, group: ShardGroup) -> None:
        self._transport, self._group = transport, group

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        self._transport.dispatch(layer, micro_batch, routed)

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        out_TD = self._transport.combine(layer, micro_batch)
        self._group.share(out_TD)
        return out_TD

    def finish(self) -> None:
        self._transport.finish()

    def reset(self) -> None:
        self._transport.reset()


class FollowerTransport:
    """Implements Transport for the other shards: they send no rows and receive the sums."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self._shapes: dict[int, torch.Size] = {}  # by micro-batch

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        self._shapes[micro_batch] = routed.x_TD.shape

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        """Raises StepAbandonedError."""
        return self._group.shared(self._shapes.pop(micro_batch), torch.float32)

    def finish(self) -> None:
        """Does nothing: the first shard finishes the step."""

    def reset(self) -> None:
        self._shapes.clear()
