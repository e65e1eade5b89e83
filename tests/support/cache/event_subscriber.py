"""A subscriber of KV events, written from the schema that vLLM publishes, and what it must know.

It knows nothing of this project's code: three frames of a message, msgspec structs, a replay
socket.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec
import zmq

from moe_serve.cache.prefix_tree import PrefixTree

Hash = int | bytes


class _Array(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """Events of vLLM up to 0.23."""


class _Map(msgspec.Struct, omit_defaults=True, tag=True):
    """Events of newer versions of vLLM."""


class ArrayStored(_Array, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class ArrayRemoved(_Array, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None


class ArrayCleared(_Array, tag="AllBlocksCleared"):
    pass


class MapStored(_Map, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class MapRemoved(_Map, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None


class MapCleared(_Map, tag="AllBlocksCleared"):
    pass


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[ArrayStored | ArrayRemoved | ArrayCleared]
    data_parallel_rank: int | None = None


class MapBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[MapStored | MapRemoved | MapCleared]
    data_parallel_rank: int | None = None


@dataclass(frozen=True)
class Block:
    """What the subscriber knows of one page."""

    parent: Hash | None
    tokens: tuple[int, ...]
    lora_name: str | None = None
    salt: str = ""


@dataclass
class Subscriber:
    """Follows one rank. `blocks` are all cached pages by their hash."""

    endpoint: str
    replay_endpoint: str
    encoding: str = "array"
    topic: str = ""
    blocks: dict[Hash, Block] = field(default_factory=dict)
    last: int = -1  # sequence number; -1: none was seen
    num_gaps: int = 0
    ranks: set[int | None] = field(default_factory=set)

    def __post_init__(self) -> None:
        batch = ArrayBatch if self.encoding == "array" else MapBatch
        self._decoder = msgspec.msgpack.Decoder(batch)
        self._context = zmq.Context.instance()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(self.topic)
        self._sub.set(zmq.RECONNECT_IVL, 10)
        self._sub.connect(self.endpoint)

    def close(self) -> None:
        self._sub.close(linger=0)

    def without_origins(self) -> dict[Hash, Block]:
        """The blocks as `blocks_of` knows them."""
        return {name: Block(block.parent, block.tokens) for name, block in self.blocks.items()}

    def receive(self, timeout_s: float) -> tuple[int, bytes] | None:
        """The next message's number and payload; None if there is none in this time."""
        if not self._sub.poll(max(0, int(timeout_s * 1000))):
            return None
        topic, sequence, payload = self._sub.recv_multipart()
        assert topic == self.topic.encode() and len(sequence) == 8
        return int.from_bytes(sequence, "big"), payload

    def follow(
        self,
        expected: dict[Hash, Block],
        timeout_s: float = 20.0,
        *,
        with_origins: bool = True,
    ) -> None:
        """Reads until it knows exactly the expected blocks; fails after the time. Where no message
        comes, it asks: the first ones are sent before it is connected."""
        end = time.monotonic() + timeout_s
        while (self.blocks if with_origins else self.without_origins()) != expected:
            assert time.monotonic() < end, f"{len(self.blocks)} of {len(expected)} blocks are known"
            message = self.receive(0.05)
            if message is None:
                self.replay()
            else:
                self.take(*message)

    def take(self, sequence: int, payload: bytes) -> None:
        """Applies one message, after what was missed before it."""
        if sequence > self.last + 1:
            self.num_gaps += 1
            self.replay()
        if sequence > self.last:
            self._apply(sequence, payload)

    def replay(self) -> None:
        """Asks for all batches after the last one that was seen, as often as the server is gone
        before it has answered."""
        while not self._ask():
            continue

    def _ask(self) -> bool:
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.connect(self.replay_endpoint)
            dealer.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
            while dealer.poll(1000):
                _, sequence, payload = dealer.recv_multipart()
                if not payload:
                    assert sequence == b"\xff" * 8
                    return True
                self._apply(int.from_bytes(sequence, "big"), payload)
        return False

    def _apply(self, sequence: int, payload: bytes) -> None:
        assert sequence > self.last, f"batch {sequence} after batch {self.last}"
        batch = self._decoder.decode(payload)
        self.ranks.add(batch.data_parallel_rank)
        for event in batch.events:
            if isinstance(event, ArrayCleared | MapCleared):
                self.blocks.clear()
            elif isinstance(event, ArrayRemoved | MapRemoved):
                for block in event.block_hashes:
                    assert all(known.parent != block for known in self.blocks.values())
                    del self.blocks[block]
            else:
                self._store(event)
        self.last = sequence

    def _store(self, event: ArrayStored | MapStored) -> None:
        assert event.medium == "GPU" and event.lora_id is None
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert parent is None or parent in self.blocks, "a parent comes before its children"
        extra = event.extra_keys or [None] * len(event.block_hashes)
        for index, (block, keys) in enumerate(zip(event.block_hashes, extra, strict=True)):
            tokens = tuple(event.token_ids[index * size : (index + 1) * size])
            assert block not in self.blocks
            self.blocks[block] = Block(parent, tokens, event.lora_name, *(keys or ()))
            parent = block


def blocks_of(tree: PrefixTree, *, as_bytes: bool = False) -> dict[Hash, Block]:
    """The full pages of a prefix tree, as a subscriber must know them, without their origins."""

    def name(key: bytes) -> Hash:
        return key if as_bytes else int.from_bytes(key[-8:], "big")

    found: dict[Hash, Block] = {}
    for page in tree:
        if tree.is_full(page):
            parent_key = tree._parent_key[page]
            parent = name(parent_key) if tree.find(parent_key) is not None else None
            found[name(tree.key_of(page))] = Block(parent, tuple(tree._tokens[page].tolist()))
    return found
