"""The option of `serve` and `launch` about KV events, with vLLM's name and keys."""

from __future__ import annotations

import json
from dataclasses import dataclass

from moe_serve.cli.options import option
from moe_serve.errors import ConfigError, shortened

ENDPOINT = "kv_events.endpoint"
_FLAG = "--kv-events-config"
_PANEL = "HTTP"
_VLLM_ENDPOINT = "tcp://*:5557"  # its default
_KEYS = {
    "endpoint": ENDPOINT,
    "replay_endpoint": "kv_events.replay_endpoint",
    "topic": "kv_events.topic",
    "buffer_steps": "kv_events.buffer_steps",
    "hwm": "kv_events.hwm",
}
_SWITCHES = ("enable_kv_cache_events", "publisher")
_WITHOUT_EFFECT = ("max_queue_size",)  # waiting changes are merged, so no queue is needed
_KNOWN = (*_SWITCHES, *_KEYS, *_WITHOUT_EFFECT)
_EXAMPLE = """as in --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq"}'"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOptions:
    """Options about KV events."""

    kv_events_config: str | None = option(
        None,
        _FLAG,
        key=ENDPOINT,
        help="Messages about the prefix cache for gateways, as a JSON object with vLLM's keys: "
        "enable_kv_cache_events, publisher (zmq or null), endpoint, replay_endpoint, topic, "
        "buffer_steps, hwm. Needs pyzmq. Default: none are sent.",
        rich_help_panel=_PANEL,
    )


def event_settings(text: str) -> dict[str, object]:
    """Reads the JSON of --kv-events-config, {vLLM's key: value}, as settings. Raises
    ConfigError."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(
            f"{_FLAG} takes a JSON object, got {shortened(repr(text))}; its keys are "
            f"{', '.join(_KNOWN)}, {_EXAMPLE}."
        )
    for name in given:
        if name not in _KNOWN:
            raise ConfigError(
                f"{_FLAG} does not take {shortened(repr(name))}; its keys are {', '.join(_KNOWN)}."
            )
    if not _is_on(given):
        return {}
    values = {key: given[name] for name, key in _KEYS.items() if given.get(name) is not None}
    if values.get("kv_events.topic") == "":
        del values["kv_events.topic"]  # vLLM's default
    return {ENDPOINT: _VLLM_ENDPOINT, **values}


def _is_on(given: dict[str, object]) -> bool:
    """Returns whether events are published. As in vLLM, a publisher alone does not enable them."""
    is_enabled, publisher = given.get("enable_kv_cache_events", False), given.get("publisher")
    if not isinstance(is_enabled, bool):
        raise ConfigError(
            f"{_FLAG}: enable_kv_cache_events is {shortened(repr(is_enabled))} and must be true "
            "or false."
        )
    if publisher not in (None, "zmq", "null"):
        raise ConfigError(
            f"{_FLAG}: publisher is {shortened(repr(publisher))} and must be zmq, or null for none."
        )
    return is_enabled and publisher != "null"
