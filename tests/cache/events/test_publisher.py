"""KV events over ZeroMQ: a subscriber that knows only the published schema knows the cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from moe_serve.cache.events.change_record import PageOrigin
from moe_serve.cache.events.kv_events import KVEvents
from moe_serve.cache.page_key import following_keys, root_key, token_array
from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.config.event_config import KVEventsConfig
from moe_serve.config.sections import EngineConfig
from moe_serve.errors import ConfigError
from tests.support.cache.event_subscriber import Block, Subscriber, blocks_of
from tests.support.server.server_process import neighbouring_ports

ROOT = root_key(b"model", b"", "")


class Server:
    """A prefix cache with a random workload, and its events."""

    def __init__(self, config: KVEventsConfig, seed: int, num_pages: int = 24) -> None:
        self.events = KVEvents(EngineConfig(kv_events=config))
        self.listener = self.events.listener(0)
        self.cache = PrefixCache(num_pages, 16, listener=self.listener)
        self._rng = random.Random(seed)

    def work(self, num_steps: int) -> None:
        """Prompts of random prefixes of each other, some with a last page that is not full; more of
        them than the cache can hold."""
        rng = self._rng
        for _ in range(num_steps):
            firsts = [rng.choice((10, 30, 50)) for _ in range(rng.randint(1, 6))]
            self.prompt(firsts, rest=rng.choice((0, 0, 5)))
            self.listener.step_ended()

    def prompt(self, firsts: list[int], rest: int = 0, origin: PageOrigin | None = None) -> None:
        cache, root = self.cache, ROOT if origin is None else root_key(b"model", b"1", origin.salt)
        tokens = token_array([first + i for first in firsts for i in range(16)])
        keys = following_keys(root, tokens, 16)
        found = cache.find(keys)
        cache.hold(found)
        pages = found + cache.allocate(len(keys) - len(found) + bool(rest))
        for index, (parent, key) in enumerate(zip([root, *keys], keys, strict=False)):
            part = tokens[index * 16 : (index + 1) * 16]
            pages[index] = cache.enter(pages[index], key, parent, part, origin or PageOrigin())
        if rest:
            part = tokens[:rest]
            pages[-1] = cache.enter(pages[-1], keys[-1] + bytes([rest]), keys[-1], part)
        cache.release(pages)


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    return KVEventsConfig(endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=f"ipc://{tmp_path}/old")


@pytest.fixture
def opened() -> Iterator[list[Server | Subscriber]]:
    """What is closed at the end."""
    parts: list[Server | Subscriber] = []
    yield parts
    for part in parts:
        (part.events if isinstance(part, Server) else part).close()


def subscriber(config: KVEventsConfig) -> Subscriber:
    assert config.endpoint is not None and config.replay_endpoint is not None
    return Subscriber(config.endpoint, config.replay_endpoint, config.encoding, config.topic or "")


def new_message(server: Server, follower: Subscriber) -> tuple[int, bytes]:
    """The next message. Until the subscriber is connected, the server works in vain."""
    while (message := follower.receive(0.05)) is None:
        server.work(5)
    return message


@pytest.mark.parametrize("encoding", ["array", "map"])
@pytest.mark.parametrize("block_hash", ["int", "bytes"])
def test_a_subscriber_knows_the_cache_exactly(
    config: KVEventsConfig, opened: list[Server | Subscriber], encoding: str, block_hash: str
) -> None:
    config = replace(config, encoding=encoding, block_hash=block_hash, topic="kv@pod@model")
    server, follower = Server(config, seed=1), subscriber(config)
    opened += [server, follower]
    for _ in range(4):
        server.work(40)
        follower.follow(blocks_of(server.cache.tree, as_bytes=block_hash == "bytes"))
    assert server.cache.num_evicted > 20, "the workload does not fit"
    assert follower.ranks == {0}
    stats = server.events.stats()
    assert stats is not None and stats.num_stored - stats.num_removed == len(follower.blocks)


def test_after_a_gap_missed_batches_are_replayed(
    config: KVEventsConfig, opened: list[Server | Subscriber]
) -> None:
    server, follower = Server(config, seed=2), subscriber(config)
    opened += [server, follower]
    server.work(20)
    follower.follow(blocks_of(server.cache.tree))
    gaps = follower.num_gaps
    while new_message(server, follower)[0] <= follower.last:  # read and thrown away
        continue
    follower.take(*new_message(server, follower))
    assert follower.num_gaps == gaps + 1
    follower.follow(blocks_of(server.cache.tree))


def test_one_who_comes_too_late_for_a_replay_gets_the_whole_cache(
    config: KVEventsConfig, opened: list[Server | Subscriber]
) -> None:
    config = replace(config, buffer_steps=2)
    server, first = Server(config, seed=3), subscriber(config)
    opened += [server, first]
    for _ in range(6):  # more batches than are kept
        server.work(20)
        first.follow(blocks_of(server.cache.tree))
    late = subscriber(config)
    opened.append(late)
    late.replay()
    assert late.blocks == blocks_of(server.cache.tree)
    server.work(20)
    late.follow(blocks_of(server.cache.tree))


def test_a_restart_shows_as_a_gap(
    config: KVEventsConfig, opened: list[Server | Subscriber]
) -> None:
    server, follower = Server(config, seed=4), subscriber(config)
    opened += [server, follower]
    follower.take(*new_message(server, follower))
    follower.follow(blocks_of(server.cache.tree))
    before = follower.last
    server.events.close()
    follower.follow({})  # told by a server that ends in peace
    follower.blocks[123] = Block(None, ())  # one that was killed told nothing
    again = Server(config, seed=5)
    opened.append(again)
    again.work(30)
    follower.replay()  # what a gap does; it need not wait for the next batch
    follower.follow(blocks_of(again.cache.tree))
    assert follower.last > before


def test_a_lost_rank_has_an_empty_cache(
    config: KVEventsConfig, opened: list[Server | Subscriber]
) -> None:
    server, follower = Server(config, seed=6), subscriber(config)
    opened += [server, follower]
    server.work(10)
    follower.follow(blocks_of(server.cache.tree))
    server.listener.cleared()
    follower.follow({})
    server.cache = PrefixCache(24, 16, listener=server.listener)
    server.work(10)
    follower.follow(blocks_of(server.cache.tree))


def test_ranks_of_a_cell_that_leaves_are_cleared_and_their_numbers_serve_again(
    config: KVEventsConfig, opened: list[Server | Subscriber]
) -> None:
    """The subscriber follows rank 1, first of one cell and then of others. ZeroMQ gives a port back
    a moment after it was closed."""
    first, second = neighbouring_ports(2)
    config = replace(config, endpoint=f"tcp://127.0.0.1:{first}")
    of_rank_1 = replace(
        config,
        endpoint=f"tcp://127.0.0.1:{second}",
        replay_endpoint=f"{config.replay_endpoint}_dp1",
    )
    server, follower = Server(config, seed=9), subscriber(of_rank_1)
    opened += [server, follower]
    for _ in range(3):
        before = server.events.stats()
        server.events.open(range(1, 2))
        server.listener = server.events.listener(1)
        server.cache = PrefixCache(24, 16, listener=server.listener)
        server.work(5)
        follower.follow(blocks_of(server.cache.tree))
        server.events.close_ranks(range(1, 2))
        follower.follow({})
        after = server.events.stats()
        assert before is not None and after is not None
        assert after.num_stored > before.num_stored, "counts never shrink"
    with pytest.raises(ConfigError, match="attention rank 60000 takes the port 60000 higher"):
        server.events.open(range(60000, 60001))


def test_adapters_and_salts_are_told_as_vllm_tells_them(
    config: KVEventsConfig, opened: list[Server | Subscriber]
) -> None:
    server, follower = Server(config, seed=7), subscriber(config)
    opened += [server, follower]
    server.prompt([10, 30], origin=PageOrigin("sql", "tenant"))
    server.listener.step_ended()
    first, second = following_keys(
        root_key(b"model", b"1", "tenant"), token_array([*range(10, 26), *range(30, 46)]), 16
    )
    one, two = (int.from_bytes(key[-8:], "big") for key in (first, second))
    expected = {
        one: Block(None, tuple(range(10, 26)), "sql", "tenant"),
        two: Block(one, tuple(range(30, 46)), "sql"),
    }
    follower.follow(expected)


def test_a_wrong_replay_request_is_ignored(
    config: KVEventsConfig, opened: list[Server | Subscriber]
) -> None:
    server, follower = Server(config, seed=8), subscriber(config)
    opened += [server, follower]
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.connect(str(config.replay_endpoint))
        for frames in ([b"x"], [b"", b"short"], [b"", b"1" * 8, b""], [b"", b"9" * 2000]):
            dealer.send_multipart(frames)
        server.work(5)
        follower.replay()
    follower.follow(blocks_of(server.cache.tree))
