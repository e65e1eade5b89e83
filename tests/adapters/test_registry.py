"""Names, versions and memory: a request keeps the version it began with."""

from __future__ import annotations

import random
import shutil
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from moe_serve.adapters.adapter import Adapter
from moe_serve.adapters.registry import AdapterRegistry, open_registry
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from tests.support.adapters.small_registry import BYTES, small_registry, write_small


def test_loading_a_name_again_makes_another_version(tmp_path: Path) -> None:
    registry = small_registry()
    registry.load("a", write_small(tmp_path / "a", 1))
    running = registry.acquire("a")
    registry.load("a", write_small(tmp_path / "a", 2))
    later = registry.acquire("a")
    assert running.version.digest != later.version.digest
    assert registry.weights(running.version.digest) is running.weights  # it drains
    del running
    assert registry.stats.num_in_memory == 1
    registry.unload("a")
    with pytest.raises(ModelNotFoundError, match="'a' does not exist"):
        registry.acquire("a")
    assert registry.weights(later.version.digest) is later.weights


def test_equal_content_under_two_names_is_in_memory_once(tmp_path: Path) -> None:
    registry = small_registry()
    write_small(tmp_path / "a", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name in "ab":
        registry.load(name, tmp_path / name)
    assert registry.acquire("a").weights is registry.acquire("b").weights
    assert registry.stats.bytes_in_memory == BYTES
    registry.unload("a")
    assert registry.in_memory("b") is not None


def test_memory_drops_what_was_used_longest_ago(tmp_path: Path) -> None:
    registry = small_registry(memory_bytes=2 * BYTES)
    for number, name in enumerate("abc"):
        registry.load(name, write_small(tmp_path / name, number))
    assert registry.in_memory("a") is None
    held = registry.acquire("a")  # read again, in place of b
    assert (registry.in_memory("b"), registry.stats.num_evictions) == (None, 2)
    other = registry.acquire("c")
    with pytest.raises(InvalidRequestError, match="hold 200: try again"):
        registry.acquire("b")
    del other
    registry.acquire("b")
    assert registry.in_memory("a") is not None, "a request holds it"
    assert held.version.name == "a" and registry.stats.bytes_in_memory == 2 * BYTES


def test_what_a_request_holds_stays_after_it(tmp_path: Path) -> None:
    """Dropping it would give no room while the request runs, and a read again after it."""
    registry = small_registry(memory_bytes=2 * BYTES)
    for number, name in enumerate("ab"):
        registry.load(name, write_small(tmp_path / name, number))
    held = registry.acquire("a")
    registry.acquire("b")
    registry.load("c", write_small(tmp_path / "c", 2))
    assert registry.in_memory("b") is None and registry.stats.num_evictions == 1
    del held
    assert registry.in_memory("a") is not None


def test_pinned_adapters_are_never_dropped(tmp_path: Path) -> None:
    registry = small_registry(memory_bytes=2 * BYTES)
    registry.load("kept", write_small(tmp_path / "kept", 9), is_pinned=True)
    for number, name in enumerate("ab"):
        registry.load(name, write_small(tmp_path / name, number))
    assert registry.in_memory("a") is None and registry.in_memory("kept") is not None
    held = registry.acquire("a")
    with pytest.raises(InvalidRequestError, match=r"requests and pinned adapters \(100\) hold 200"):
        registry.acquire("b")
    del held
    stats = registry.stats
    assert (stats.num_pinned, stats.pinned_bytes) == (1, BYTES)
    write_small(tmp_path / "kept", 10)
    assert registry.load("kept", tmp_path / "kept", is_pinned=True)  # in place of its old version
    registry.load("kept", tmp_path / "kept")  # again, and not pinned
    for name in "ab":
        registry.acquire(name)
    assert registry.in_memory("kept") is None and registry.stats.num_pinned == 0


def test_nothing_is_dropped_for_what_cannot_fit(tmp_path: Path) -> None:
    registry = small_registry(memory_bytes=2 * BYTES - 1)
    registry.load("kept", write_small(tmp_path / "kept", 9), is_pinned=True)
    with pytest.raises(
        InvalidRequestError, match="is 199, of which pinned adapters hold 100: raise"
    ):
        registry.load("a", write_small(tmp_path / "a"))
    registry.unload("kept")
    registry.load("b", write_small(tmp_path / "b"))
    registry._config = replace(registry._config, memory_bytes=BYTES - 1)
    with pytest.raises(InvalidRequestError, match="of which pinned adapters hold 0: raise it"):
        registry.load("a", tmp_path / "a")
    assert registry.in_memory("b") is not None


def test_pins_name_configured_adapters(tmp_path: Path) -> None:
    modules = (f"a={write_small(tmp_path / 'a')}",)
    build = small_registry()._build
    config = AdapterConfig(is_enabled=True, modules=modules, pinned=("a",))
    assert open_registry(config, build).stats.num_pinned == 1
    with pytest.raises(ConfigError, match=r"adapters.pinned has the name 'b'.*\(a\)"):
        open_registry(replace(config, pinned=("b",)), build)


def test_changed_files_are_not_served_under_the_old_version(tmp_path: Path) -> None:
    registry = small_registry(memory_bytes=BYTES)
    for number, name in enumerate("ab"):
        registry.load(name, write_small(tmp_path / name, number))
    write_small(tmp_path / "a", 5)
    with pytest.raises(InvalidRequestError, match="has changed since it was loaded"):
        registry.acquire("a")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(InvalidRequestError, match="is not a folder"):
        registry.acquire("a")
    assert registry.stats.num_failures == 2


def test_there_is_a_limit_of_names(tmp_path: Path) -> None:
    registry = small_registry(max_adapters=2)
    folder = write_small(tmp_path / "a")
    for name in ("one", "two", "two"):
        registry.load(name, folder)
    with pytest.raises(InvalidRequestError, match=r"At most 2 adapters may be loaded"):
        registry.load("three", folder)


@pytest.mark.parametrize("name", ["", " a", "a b", "../a", "a\n", "x" * 129, "ä"])
def test_names_that_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="lora_name"):
        small_registry().load(name, write_small(tmp_path / "a"))


@pytest.mark.parametrize("path", ["../a", "/etc", ".", "", "link", "with_link", "\0", "x/../.."])
def test_paths_out_of_the_root_are_refused(path: str, tmp_path: Path) -> None:
    write_small(tmp_path / "outside")
    root = tmp_path / "root"
    write_small(root / "with_link")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "with_link" / "adapter_config.json").unlink()
    (root / "with_link" / "adapter_config.json").symlink_to("../../outside/adapter_config.json")
    registry = small_registry(root=str(root))
    with pytest.raises(InvalidRequestError, match="must be a folder below adapters.root"):
        registry.load_below_root("a", path)
    write_small(root / "deep" / "good")
    assert registry.load_below_root("a", "deep/good").name == "a"
    assert registry.load_below_root("a", str(root / "deep" / "good")).name == "a"


def test_without_a_root_clients_load_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="adapters.root is not set"):
        small_registry().load_below_root("a", str(write_small(tmp_path / "a")))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["a"], "give name=path"),
        (["a="], "give name=path"),
        (["a={}", "a={}"], "the name 'a' twice"),
        (["a b={}"], "lora_name is 'a b'"),
        (["a={}/missing"], "adapters.modules, 'a': .*/missing is not a folder"),
    ],
)
def test_configured_adapters_that_are_refused(
    modules: list[str], message: str, tmp_path: Path
) -> None:
    folder = write_small(tmp_path / "a")
    config = AdapterConfig(is_enabled=True, modules=tuple(m.format(folder) for m in modules))
    registry = small_registry()
    with pytest.raises(ConfigError, match=message):
        open_registry(config, registry._build)


def test_thousands_of_requests_never_get_another_adapter(tmp_path: Path) -> None:
    """Names come and go and change their content; 8 of 50 fit into memory. Each request must have
    the content that its name stood for when it began, until it ends."""
    rng = random.Random(11)
    registry = small_registry(memory_bytes=8 * BYTES)
    digests: dict[str, bytes] = {}
    for number in range(50):
        _load(registry, digests, tmp_path, f"n{number}", number)
    running: deque[tuple[Adapter, bytes]] = deque()
    for turn in range(3000):
        name = f"n{min(49, int(rng.paretovariate(0.7)) - 1)}"
        if turn % 50 == 0:
            registry.unload(name)
            del digests[name]
            with pytest.raises(ModelNotFoundError):
                registry.acquire(name)
            _load(registry, digests, tmp_path, name, 1000 + turn)
        if len(running) == 7:
            held, digest = running.popleft()
            assert held.version.digest == held.weights.digest == digest
            assert registry.weights(digest) is held.weights
            del held
        adapter = registry.acquire(name)
        assert (adapter.name, adapter.weights.digest) == (name, digests[name])
        running.append((adapter, digests[name]))
        assert registry.stats.bytes_in_memory <= 8 * BYTES


def _load(
    registry: AdapterRegistry, digests: dict[str, bytes], root: Path, name: str, number: int
) -> None:
    digests[name] = registry.load(name, write_small(root / name, number)).digest
