"""The KV events of a server: one publisher for each attention rank."""

from __future__ import annotations

import importlib.util
import time

from moe_serve.cache.events.change_record import IGNORE_PAGES, PageListener
from moe_serve.cache.events.endpoints import (
    check_endpoints,
    check_port,
    event_endpoint,
    replay_endpoint,
)
from moe_serve.cache.events.event_encoder import EventEncoder
from moe_serve.cache.events.publisher import EventPublisher, EventStats, PublisherLimits
from moe_serve.config.cell_config import cell_shapes
from moe_serve.config.sections import EngineConfig
from moe_serve.errors import ConfigError

_REOPEN_S, _POLL_S = 5.0, 0.02


class KVEvents:
    """Opens the addresses of all ranks at once; without `kv_events.endpoint` there are none. An
    added cell opens further addresses, and those of a cell that has left are closed.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError for an address that cannot be used."""
        self._config = config
        self._publishers: dict[int, EventPublisher] = {}  # replaced, never changed
        self._past = EventStats()  # of those that were closed
        self._closed: set[int] = set()
        try:
            self.open(range(_num_ranks(config)))
        except BaseException:
            self.close()
            raise

    def open(self, ranks: range) -> None:
        """Opens the addresses of some ranks. Raises ConfigError if one cannot be used; then none of
        them is open.
        """
        try:
            for rank in ranks:
                self._open_again(rank)
        except BaseException:
            self.close_ranks(ranks)
            raise

    def _open_again(self, rank: int) -> None:
        """Opens the addresses of a rank. After a close they may be in use for another moment,
        because ZeroMQ closes them on its own thread.
        """
        until = time.monotonic() + (_REOPEN_S if rank in self._closed else 0.0)
        while True:
            try:
                self._open(rank)
                return
            except ConfigError:
                if time.monotonic() >= until:
                    raise
            time.sleep(_POLL_S)

    def close_ranks(self, ranks: range) -> None:
        """Tells the subscribers of some ranks that their caches are gone, and closes them."""
        for publisher in [self._publishers[rank] for rank in ranks if rank in self._publishers]:
            publisher.close()
            self._past += publisher.stats
        self._closed.update(ranks)
        self._publishers = {r: each for r, each in self._publishers.items() if r not in ranks}

    def _open(self, rank: int) -> None:
        config, events = self._config, self._config.kv_events
        endpoint, replay = event_endpoint(events), replay_endpoint(events)
        if endpoint is None:
            return
        check_port("kv_events.endpoint", endpoint, rank)
        if replay is not None:
            check_port("kv_events.replay_endpoint", replay, rank)
        encoder = EventEncoder(
            rank=rank,
            page_size=config.cache.page_size,
            encoding=events.encoding,
            block_hash=events.block_hash,
        )
        publisher = EventPublisher(
            encoder,
            endpoint.for_rank(rank),
            None if replay is None else replay.for_rank(rank),
            events.topic or "",
            PublisherLimits(
                buffer_steps=events.buffer_steps,
                hwm=events.hwm,
                give_after_s=config.cache.checkpoint_after_s,
            ),
        )
        self._publishers = {**self._publishers, rank: publisher}

    def listener(self, rank: int) -> PageListener:
        """Returns the listener for the changes of an attention rank's prefix cache. A single
        process has rank 0, and the ranks of several cells are numbered consecutively.
        """
        return self._publishers[rank].record if self._publishers else IGNORE_PAGES

    def stats(self) -> EventStats | None:
        """Returns the counts of all ranks; None if nothing is published. Safe from any thread."""
        if self._config.kv_events.endpoint is None:
            return None
        return sum((each.stats for each in self._publishers.values()), self._past)

    def close(self) -> None:
        """Ends all publishers. May be called again."""
        for publisher in self._publishers.values():
            publisher.close()


def _num_ranks(config: EngineConfig) -> int:
    """Returns the attention ranks of all cells; one process counts as one."""
    shapes = cell_shapes(config)
    return max(1, config.cluster.attention_ranks, sum(s.attention_ranks for s in shapes))


def check_kv_events(config: EngineConfig) -> None:
    """Raises ConfigError if events cannot be published as configured, before a model is loaded."""
    events = config.kv_events
    if events.endpoint is None:
        if events.replay_endpoint is not None:
            raise ConfigError(
                f"kv_events.replay_endpoint is {events.replay_endpoint!r}, but kv_events.endpoint "
                "is not set, so there are no events to replay: set it too, or leave both out."
            )
        return
    if not config.cache.prefix_cache:
        raise ConfigError(
            f"kv_events.endpoint is {events.endpoint!r}, but cache.prefix_cache is false, so there "
            "are no events: set cache.prefix_cache to true, or leave out kv_events.endpoint."
        )
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError(
            f"kv_events.endpoint is {events.endpoint!r}, which needs pyzmq: install "
            "moe-serve[events], or leave it out."
        )
    check_endpoints(events, _num_ranks(config))
