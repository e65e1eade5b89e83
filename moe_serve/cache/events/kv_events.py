"""The KV events of a server: one publisher for each attention rank."""

from __future__ import annotations

import importlib.util

from moe_serve.cache.events.change_record import IGNORE_PAGES, PageListener
from moe_serve.cache.events.endpoints import check_endpoints, event_endpoint, replay_endpoint
from moe_serve.cache.events.event_encoder import EventEncoder
from moe_serve.cache.events.publisher import EventPublisher, EventStats, PublisherLimits
from moe_serve.config.cell_config import cell_shapes
from moe_serve.config.sections import EngineConfig
from moe_serve.errors import ConfigError


class KVEvents:
    """Opens the addresses of all ranks at once; without `kv_events.endpoint` there are none."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError for an address that cannot be used."""
        self._publishers: list[EventPublisher] = []
        try:
            for rank in range(_num_ranks(config)):
                self._open(config, rank)
        except BaseException:
            self.close()
            raise

    def _open(self, config: EngineConfig, rank: int) -> None:
        events = config.kv_events
        endpoint, replay = event_endpoint(events), replay_endpoint(events)
        if endpoint is None:
            return
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
        self._publishers.append(publisher)

    def listener(self, rank: int) -> PageListener:
        """Returns what the prefix cache of an attention rank tells its changes; one process has
        rank 0, and the ranks of several cells are counted through."""
        return self._publishers[rank].record if self._publishers else IGNORE_PAGES

    def stats(self) -> EventStats | None:
        """Returns the counts of all ranks, on any thread; None if nothing is published."""
        if not self._publishers:
            return None
        return sum((publisher.stats for publisher in self._publishers), EventStats())

    def close(self) -> None:
        """Ends all publishers. May be called again."""
        for publisher in self._publishers:
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
