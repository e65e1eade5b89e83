"""Opens the KV tier of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from moe_serve.cache.kv_cache import KVCache
from moe_serve.cache.page_bytes import PageBytes
from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.cache.tiers.disk_folder import DiskFolder, StoreIdentity, weights_digest
from moe_serve.cache.tiers.disk_space import DiskLimits
from moe_serve.cache.tiers.disk_store import DiskStore
from moe_serve.cache.tiers.page_cipher import ENCRYPTION, DiskKey
from moe_serve.clock import REAL_CLOCK
from moe_serve.config.sections import CacheConfig, EngineConfig
from moe_serve.engine.opened_model import LoadReport, OpenedModel
from moe_serve.engine.schedule.kv_tier import MakeTier
from moe_serve.engine.schedule.page_tiers import PageAccess, PageTiers
from moe_serve.errors import ConfigError

_WITHOUT_EFFECT = (
    "path", "max_merged_models", "num_threads", "expert_memory_bytes", "expert_memory_policy",
)  # fmt: skip


def check_tiers(config: EngineConfig) -> None:
    """Raises ConfigError for a tier that the rest of the configuration does not allow."""
    cache = config.cache
    if cache.memory_tier_bytes is not None and not config.cluster.is_disaggregated:
        raise ConfigError(
            "cache.memory_tier_bytes is set, but attention and experts share one process, whose "
            "pages are in main memory already: raise cache.memory_bytes instead, or serve with "
            "attention and expert ranks."
        )
    if cache.memory_tier_bytes is not None and not cache.prefix_cache:
        raise ConfigError(
            "cache.memory_tier_bytes is set, but cache.prefix_cache is false: the memory tier "
            "keeps pages of the prefix cache. Set cache.prefix_cache to true, or leave it out."
        )
    if cache.disk_path is None:
        if cache.disk_key_file is not None:
            raise ConfigError(
                "cache.disk_key_file is set, but cache.disk_path is not: give the folder of the "
                "pages to be encrypted, or leave out cache.disk_key_file."
            )
        return
    _disk_key(cache)  # refused before a model is loaded
    if not cache.prefix_cache:
        raise ConfigError(
            "cache.disk_path is set, but cache.prefix_cache is false: the disk tier keeps pages of "
            "the prefix cache. Set cache.prefix_cache to true, or leave out cache.disk_path."
        )


def tier_maker(
    config: EngineConfig, model: OpenedModel, cache: KVCache, report: LoadReport
) -> MakeTier | None:
    """Returns the function that makes an engine's tier; None without a tier. Raises ConfigError."""
    if config.cache.disk_path is None:
        return None
    if cache.device.type != "cpu":
        raise ConfigError(
            f"cache.disk_path is set, but the KV pages are on {cache.device.type}: the disk tier "
            "serves pages in main memory only (model.device: cpu)."
        )
    pages = PageBytes(cache)
    store = open_disk(config, model.folder, report, page_bytes=pages.num_bytes)
    access = PageAccess(pages.read, pages.write, pages.num_bytes)

    def make(prefixes: PrefixCache) -> PageTiers:
        after_s = config.cache.checkpoint_after_s
        return PageTiers(prefixes, store, access, REAL_CLOCK, after_s)

    return make


def open_disk(
    config: EngineConfig,
    model_folder: Path,
    report: LoadReport,
    *,
    page_bytes: int,
    layout: Mapping[str, object] | None = None,
) -> DiskStore:
    """Opens the store of `cache.disk_path`. `report` is that of the process that has the pages.
    `layout` names further facts that the bits of a page depend on. Raises ConfigError.
    """
    cache, key = config.cache, _disk_key(config.cache)
    facts = {**_facts(config, report), **(layout or {})}
    if key is not None:
        facts["encryption"] = ENCRYPTION
    assert cache.disk_path is not None, "a folder is configured"
    limits = DiskLimits(
        max_bytes=cache.disk_bytes,
        min_free_bytes=cache.disk_min_free_bytes,
        ttl_s=cache.disk_ttl_s,
        write_bytes_per_day=cache.disk_write_bytes_per_day,
    )
    folder = DiskFolder.claim(Path(cache.disk_path).expanduser())

    def identify() -> StoreIdentity:
        weights = weights_digest(model_folder, folder.path / "weights.json")
        meta = {**facts, "weights": weights.hex()}
        digest = sha256(repr(sorted(meta.items())).encode()).digest()
        return StoreIdentity(digest, {**meta, "model": model_folder.name})

    try:
        return DiskStore(
            folder,
            limits,
            page_bytes=page_bytes,
            geometry=bytes.fromhex(report.page_geometry),
            identify=identify,
            key=key,
        )
    except ConfigError:
        folder.release()
        raise


def _disk_key(cache: CacheConfig) -> DiskKey | None:
    """Reads the key of encrypted pages; None without one. Raises ConfigError."""
    if cache.disk_path is None or cache.disk_key_file is None:
        return None
    return DiskKey.read(Path(cache.disk_key_file).expanduser(), Path(cache.disk_path).expanduser())


def _facts(config: EngineConfig, report: LoadReport) -> Mapping[str, object]:
    """Returns all facts except the weights that the bits of a page may depend on."""
    model = {k: v for k, v in asdict(config.model).items() if k not in _WITHOUT_EFFECT}
    return {
        "config": repr(sorted(model.items())),
        "dtype": report.dtype,
        "kv_dtype": report.kv_dtype,
        "kernels": report.kernels,
        "build": report.build,
        "expert_weights": report.expert_weights,
        "wire_dtype": config.cluster.wire_dtype,
        "page_size": config.cache.page_size,
        "geometry": report.page_geometry,
    }
