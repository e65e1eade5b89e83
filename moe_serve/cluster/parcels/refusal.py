"""Compares the facts that two attention ranks report about their pages."""

from __future__ import annotations

from moe_serve.cluster.control.messages import Loaded
from moe_serve.cluster.control.parcel_messages import ParcelFacts


def pages_refusal(source: Loaded, target: Loaded) -> str:
    """Returns why one rank cannot use the pages of another, with both values; empty if it can use
    them as if it had computed them.
    """
    ours, theirs = _facts(source), _facts(target)
    for name, a, b in (
        ("weights", source.weights_hash[:12], target.weights_hash[:12]),
        ("page size", ours.page_size, theirs.page_size),
        ("dtype", source.report.dtype, target.report.dtype),
        ("KV dtype", source.report.kv_dtype, target.report.kv_dtype),
        ("kernels", source.report.kernels, target.report.kernels),
        ("build of the kernels", source.report.build, target.report.build),
        ("device", source.report.device, target.report.device),
        ("form of quantised weights", source.report.expert_weights, target.report.expert_weights),
        ("shape of pages", ours.geometry[:12], theirs.geometry[:12]),
    ):
        if a != b:
            return f"they differ in {name}: {a} at the source and {b} at the target"
    return ""


def _facts(loaded: Loaded) -> ParcelFacts:
    assert loaded.parcels is not None, "the rank takes part in parcels"
    return loaded.parcels
