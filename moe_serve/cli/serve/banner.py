"""The rows of the ready message beside the model: limits, experts, routes and changed settings."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI

from moe_serve.config.sections import Config
from moe_serve.config.sources import DEFAULT_SOURCE, ConfigEntry
from moe_serve.engine.layout import Layout
from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.http.pages.page_files import PAGE_FILES


def banner_rows(
    config: Config,
    settings: Sequence[ConfigEntry],
    layout: Layout,
    placement: PlacementControl | None,
    app: FastAPI,
) -> dict[str, str]:
    """Returns one line per row. Of secrets only their number is shown."""
    rows = {"limits": _limits(config, layout)}
    if placement is not None:
        rows["placed"] = _placed(placement)
    rows["pages"] = ", ".join(path for path in PAGE_FILES if "/assets/" not in path)
    rows["routes"] = _routes(app)
    changed = [entry for entry in settings if entry.source != DEFAULT_SOURCE]
    if changed:
        rows["set"] = ", ".join(f"{entry.key.path}={entry.shown}" for entry in changed)
    return rows


def _limits(config: Config, layout: Layout) -> str:
    scheduler, num_ranks = config.engine.scheduler, max(1, layout.attention_ranks)
    most = scheduler.max_num_seqs * num_ranks
    full = layout.num_pages * layout.page_size / layout.max_model_len
    return (
        f"{most} sequences at once, {full:.1f} if each has {layout.max_model_len} tokens; "
        f"{scheduler.max_batched_tokens} tokens in a step, {scheduler.max_queued_requests} may wait"
    )


def _placed(placement: PlacementControl) -> str:
    plan = placement.plan()
    counts = [sum(map(len, plan.held_by(rank).values())) for rank in range(plan.num_ranks)]
    num_layers = len(plan.ranks_of)
    return (
        f"{sum(counts)} experts of {num_layers} layers, copies included, on {plan.num_ranks} "
        f"expert ranks: {min(counts)} to {max(counts)} each"
    )


def _routes(app: FastAPI) -> str:
    """Returns the routes of the OpenAPI schema, which is built now instead of at the first request
    for it."""
    return ", ".join(path for path in app.openapi()["paths"] if "{" not in path)
