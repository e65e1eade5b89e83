"""Settings of KV events that cannot work are refused before a model is loaded, in one sentence."""

from __future__ import annotations

import importlib.util
import socket

import pytest

from moe_serve.cache.events.endpoints import event_endpoint
from moe_serve.cache.events.kv_events import check_kv_events
from moe_serve.config.event_config import AttachName, KVEventsConfig
from moe_serve.config.sections import CacheConfig, ClusterConfig, EngineConfig
from moe_serve.errors import ConfigError


@pytest.mark.parametrize(
    ("endpoint", "replay", "complaint"),
    [
        ("5557", None, "kv_events.endpoint is '5557', and must be a ZeroMQ address such as"),
        ("tcp://*:0", None, "a port is 1 to 65535"),
        ("tcp://*:65535", None, "give a port of at most 65534"),
        ("tcp://*:5557", "tcp://*:5558", "port 5558 is also needed for kv_events.endpoint"),
        (None, "tcp://*:5558", "kv_events.endpoint is not set"),
    ],
)
def test_wrong_addresses_are_refused(
    endpoint: str | None, replay: str | None, complaint: str
) -> None:
    config = EngineConfig(
        kv_events=KVEventsConfig(endpoint=endpoint, replay_endpoint=replay),
        cluster=ClusterConfig(attention_ranks=2, expert_ranks=1),
    )
    with pytest.raises(ConfigError, match=r"^[^\n]*\.$") as error:
        check_kv_events(config)
    assert complaint in str(error.value)


def test_a_port_that_is_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot listen on port .*Address already in use"):
            check_kv_events(EngineConfig(kv_events=KVEventsConfig(endpoint=endpoint)))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    events = KVEventsConfig(endpoint="ipc:///tmp/events")
    with pytest.raises(ConfigError, match=r"cache\.prefix_cache is false"):
        check_kv_events(EngineConfig(kv_events=events, cache=CacheConfig(prefix_cache=False)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs pyzmq: install moe-serve\[events\]"):
        check_kv_events(EngineConfig(kv_events=events))


@pytest.mark.parametrize(
    ("endpoint", "attach", "is_bound", "of_rank_1"),
    [  # where the gateway listens, all ranks connect to one address
        ("tcp://*:5557", "auto", True, "tcp://*:5558"),
        ("tcp://127.0.0.1:5557", "auto", True, "tcp://127.0.0.1:5558"),
        ("tcp://[::1]:5557", "auto", True, "tcp://[::1]:5558"),
        ("tcp://epp.svc:5557", "auto", False, "tcp://epp.svc:5557"),
        ("tcp://10.0.0.1:5557", "bind", True, "tcp://10.0.0.1:5558"),
        ("tcp://127.0.0.1:5557", "connect", False, "tcp://127.0.0.1:5557"),
        ("ipc:///run/kv", "auto", True, "ipc:///run/kv_dp1"),
    ],
)
def test_ranks_have_addresses_in_a_row(
    endpoint: str, attach: AttachName, is_bound: bool, of_rank_1: str
) -> None:
    found = event_endpoint(KVEventsConfig(endpoint=endpoint, attach=attach))
    assert found is not None and found.is_bound == is_bound
    assert found.for_rank(1).address == of_rank_1 and found.for_rank(0) is found
