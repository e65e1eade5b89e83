"""The hub, the cache and the token to use, as `huggingface_hub` reads them from the environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moe_serve.errors import HubError


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """The hub that models are fetched from, and the folder that keeps them."""

    endpoint: str  # HF_ENDPOINT
    cache: Path  # HF_HUB_CACHE, else HF_HOME/hub
    token: str | None = field(default=None, repr=False)  # HF_TOKEN, or the one that was stored
    is_offline: bool = False  # HF_HUB_OFFLINE
    timeout_s: float = 30.0  # for a connection, and between two pieces of an answer
    retry_waits_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts in a row
    num_streams: int = 4  # files received at once


def hub_settings() -> HubSettings:
    """Reads the settings. Raises HubError.

    `huggingface_hub` is imported here, so that it takes no time where no name is given. Only its
    settings, its token and its view of the cache are used: requests are our own, so no telemetry is
    sent and no xet client starts.
    """
    from huggingface_hub import constants, get_token

    try:
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    except OSError as error:
        raise HubError(f"the stored token of the hub cannot be read: {error}.") from error
    return HubSettings(
        endpoint=constants.ENDPOINT.rstrip("/"),
        cache=Path(constants.HF_HUB_CACHE).expanduser(),
        token=token,
        is_offline=bool(constants.HF_HUB_OFFLINE),
    )
