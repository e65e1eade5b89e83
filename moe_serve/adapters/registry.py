"""The adapters of a server: names, versions, and the weights that are in memory.

A name stands for a version, which is the digest of the adapter's content. Loading a name again
makes a new version. Requests that hold the old one keep its weights, and finish with them.

Weights are in memory while a request holds them, and as long as there is room. When it is short,
those used longest ago are dropped; they are read again when a request names them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from moe_serve.adapters.adapter import Adapter, AdapterVersion
from moe_serve.adapters.adapter_build import BuildAdapter
from moe_serve.adapters.adapter_files import open_unchanged
from moe_serve.adapters.adapter_name import check_adapter_name, folder_below
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.errors import CheckpointError, ConfigError, InvalidRequestError, ModelNotFoundError
from moe_serve.model.stage.adapter_rows import AdapterWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStats:
    """Counts since the start, and what is in memory now."""

    num_loads: int = 0  # from files, also again
    num_failures: int = 0
    num_evictions: int = 0
    load_seconds: float = 0.0
    num_names: int = 0
    num_in_memory: int = 0
    bytes_in_memory: int = 0
    num_pinned: int = 0  # names
    pinned_bytes: int = 0


class AdapterRegistry:
    """Loads, finds and drops adapters. Every method may be called by any thread."""

    def __init__(self, config: AdapterConfig, build: BuildAdapter) -> None:
        self._config, self._build = config, build
        self._loading = threading.Lock()  # one load at a time
        self._lock = threading.Lock()  # guards the rest; never held while files are read
        self._versions: dict[str, AdapterVersion] = {}
        # Weights by digest, the last used last. A request keeps its own alive beyond this.
        self._kept: OrderedDict[bytes, AdapterWeights] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[bytes, AdapterWeights]
        self._alive = weakref.WeakValueDictionary()
        self._num_loads = self._num_failures = self._num_evictions = 0
        self._seconds = 0.0

    @property
    def max_names(self) -> int:
        return self._config.max_adapters

    @property
    def memory_bytes(self) -> int | None:
        """The largest number of bytes that adapters may take in memory; None if it is unlimited."""
        return self._config.memory_bytes

    def versions(self) -> list[AdapterVersion]:
        """Returns the current version of every name, in the order of loading."""
        return list(self._versions.values())

    def version(self, name: str) -> AdapterVersion | None:
        """Returns the current version of a name; None: there is no such adapter."""
        return self._versions.get(name)

    def load(self, name: str, folder: Path, *, is_pinned: bool = False) -> AdapterVersion:
        """Loads a folder under a name. If the name is in use, its requests from now on get this
        version. The weights of a pinned version are never dropped for others.

        Raises CheckpointError for a folder that cannot be served, and InvalidRequestError if there
        are too many names, or no room.
        """
        check_adapter_name(name)
        with self._loading:
            most = self._config.max_adapters
            if name not in self._versions and len(self._versions) >= most:
                raise InvalidRequestError(
                    f"At most {most} adapters may be loaded (adapters.max_adapters), and that many "
                    "are: unload one, or raise adapters.max_adapters.",
                    param="lora_name",
                    code="too_many_adapters",
                )
            version, _ = self._read(name, folder, expected=None)
            version = replace(version, is_pinned=is_pinned)
            with self._lock:
                before = self._versions.get(name)
                self._versions[name] = version
                if before is not None:
                    self._release(before)
            return version

    def load_below_root(self, name: str, path: str, *, is_pinned: bool = False) -> AdapterVersion:
        """Loads a folder below `adapters.root`, for a client. See `load`."""
        return self.load(name, folder_below(self._config.root, path), is_pinned=is_pinned)

    def unload(self, name: str) -> AdapterVersion:
        """Forgets a name. Requests that hold its version finish."""
        with self._lock:
            version = self._known(name)
            del self._versions[name]
            self._release(version)
            return version

    def _release(self, version: AdapterVersion) -> None:
        """Releases the weights of a version, unless another name stands for them."""
        if all(each.digest != version.digest for each in self._versions.values()):
            self._kept.pop(version.digest, None)

    def acquire(self, name: str) -> Adapter:
        """Returns the current version of a name with its weights, which are read again if they
        were dropped. Raises ModelNotFoundError, and InvalidRequestError if they cannot be read."""
        found = self.in_memory(name)
        if found is not None:
            return found
        with self._loading:
            found = self.in_memory(name)  # another request may have read it
            if found is not None:
                return found
            version = self._known(name)
            try:
                _, weights = self._read(name, version.folder, expected=version.digest)
            except CheckpointError as error:
                raise InvalidRequestError(
                    f"The adapter {name!r} is not in memory and cannot be read again: {error}",
                    param="model",
                    code="adapter_unavailable",
                ) from None
            return Adapter(version=version, weights=weights)

    def in_memory(self, name: str) -> Adapter | None:
        """Returns the current version of a name; None: its weights are not in memory. Never waits
        for a load. Raises ModelNotFoundError."""
        with self._lock:
            version = self._known(name)
            weights = self._alive.get(version.digest)
            if weights is None:
                return None
            self._keep(weights)
            return Adapter(version=version, weights=weights)

    def discard(self, digest: bytes) -> None:
        """Forgets weights that ranks no longer have. A request that names them reads them again."""
        with self._lock:
            self._kept.pop(digest, None)
            self._alive.pop(digest, None)

    def _known(self, name: str) -> AdapterVersion:
        version = self._versions.get(name)
        if version is None:
            raise ModelNotFoundError(f"The adapter {name[:100]!r} does not exist.")
        return version

    def weights(self, digest: bytes) -> AdapterWeights:
        """Returns the weights of an adapter that a running request holds."""
        return self._alive[digest]

    @property
    def stats(self) -> AdapterStats:
        alive = list(self._alive.values())
        pinned = self._pinned()
        return AdapterStats(
            num_loads=self._num_loads,
            num_failures=self._num_failures,
            num_evictions=self._num_evictions,
            load_seconds=self._seconds,
            num_names=len(self._versions),
            num_in_memory=len(alive),
            bytes_in_memory=sum(each.num_bytes for each in alive),
            num_pinned=sum(each.is_pinned for each in self.versions()),
            pinned_bytes=sum(each.num_bytes for each in alive if each.digest in pinned),
        )

    def is_in_memory(self, version: AdapterVersion) -> bool:
        """Returns True if the weights of a version are in memory. Does not count as a use."""
        return version.digest in self._alive

    def _read(
        self, name: str, folder: Path, expected: bytes | None
    ) -> tuple[AdapterVersion, AdapterWeights]:
        """Reads a folder and keeps its weights. With `expected`, only this digest is accepted."""
        clock = time.perf_counter()
        try:
            weights = self._built(folder, expected)
            with self._lock:
                self._make_room(weights, name)
                self._alive[weights.digest] = weights
                self._keep(weights)
        except Exception:
            self._num_failures += 1
            raise
        self._num_loads += 1
        self._seconds += time.perf_counter() - clock
        version = AdapterVersion(
            name=name,
            folder=folder,
            digest=weights.digest,
            kind=weights.kind,
            rank=weights.rank,
            loaded_at=int(time.time()),
            num_bytes=weights.num_bytes,
        )
        return version, weights

    def _pinned(self, beside: str = "") -> frozenset[bytes]:
        """Returns the digests of pinned versions, without that of one name."""
        pinned = (each for each in self.versions() if each.is_pinned and each.name != beside)
        return frozenset(each.digest for each in pinned)

    def _built(self, folder: Path, expected: bytes | None) -> AdapterWeights:
        with open_unchanged(folder, expected) as files:
            alive = self._alive.get(files.digest)  # under another name, or held by a request
            return self._build(files) if alive is None else alive

    def _keep(self, weights: AdapterWeights) -> None:
        self._kept[weights.digest] = weights
        self._kept.move_to_end(weights.digest)

    def _make_room(self, wanted: AdapterWeights, name: str) -> None:
        """Drops weights that are not pinned and that no request holds, those used longest ago
        first, until the wanted ones fit, for which `name` will stand. Raises InvalidRequestError if
        they do not."""
        limit = self._config.memory_bytes
        if limit is None:
            return
        pinned = self._pinned(beside=name)
        others = {d: w.num_bytes for d, w in list(self._alive.items()) if d != wanted.digest}
        fixed = sum(num_bytes for digest, num_bytes in others.items() if digest in pinned)
        if wanted.num_bytes + fixed > limit:  # nothing is dropped for it in vain
            raise _no_room(wanted, limit, f"pinned adapters hold {fixed}: raise it.")
        self._drop_oldest(wanted, limit, pinned)
        used = self._used_beside(wanted)
        if used + wanted.num_bytes > limit:
            holders = f"running requests and pinned adapters ({fixed}) hold {used}"
            raise _no_room(wanted, limit, f"{holders}: try again later, or raise it.")

    def _drop_oldest(self, wanted: AdapterWeights, limit: int, pinned: Collection[bytes]) -> None:
        """Drops the weights used longest ago until the wanted ones fit. Weights that a request
        holds are skipped, because dropping them would not free their memory yet."""
        staying: OrderedDict[bytes, AdapterWeights] = OrderedDict()
        for digest in list(self._kept):
            if self._used_beside(wanted) + wanted.num_bytes <= limit:
                break
            if digest == wanted.digest or digest in pinned:
                continue
            del self._kept[digest]
            held = self._alive.get(digest)
            if held is not None:
                staying[digest] = held
            else:
                self._num_evictions += 1
        for digest in reversed(staying):
            self._kept[digest] = staying[digest]
            self._kept.move_to_end(digest, last=False)

    def _used_beside(self, wanted: AdapterWeights) -> int:
        return sum(
            each.num_bytes for digest, each in list(self._alive.items()) if digest != wanted.digest
        )


def _no_room(wanted: AdapterWeights, limit: int, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The adapter needs {wanted.num_bytes} bytes, but adapters.memory_bytes is {limit}, of "
        f"which {why}",
        param="model",
        code="adapter_memory",
    )


def open_registry(config: AdapterConfig, build: BuildAdapter) -> AdapterRegistry:
    """Makes the registry and loads the configured adapters. Raises ConfigError for one of them."""
    registry = AdapterRegistry(config, build)
    names = {item.partition("=")[0] for item in config.modules}
    unknown = sorted(set(config.pinned) - names)
    if unknown:
        raise ConfigError(
            f"adapters.pinned has the name {unknown[0][:200]!r}, which is none of adapters.modules "
            f"({', '.join(sorted(names))[:300] or 'there are none'}): name one of these."
        )
    for item in config.modules:
        name, separator, path = item.partition("=")
        if not separator or not path:
            raise ConfigError(
                f"adapters.modules has {item[:200]!r}: give name=path (--lora-modules name=path)."
            )
        if registry.version(name) is not None:
            raise ConfigError(
                f"adapters.modules has the name {name!r} twice: choose another for one of them."
            )
        try:
            registry.load(name, Path(path).expanduser(), is_pinned=name in config.pinned)
        except (CheckpointError, InvalidRequestError) as error:
            raise ConfigError(f"adapters.modules, {name[:200]!r}: {error}") from None
    return registry
