"""The planned memory of a server, computed before a weight is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.cluster.members.current_placement import PlacementVersion
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.config.sections import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    SpeculationConfig,
)
from moe_serve.engine.build import build_engine
from moe_serve.engine.memory import free_memory
from moe_serve.engine.memory.free_memory import free_bytes
from moe_serve.engine.memory.memory_plan import MemoryPlan, ProcessMemory, Room, gib
from moe_serve.errors import ConfigError
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.planning import plan_memory as module
from moe_serve.planning.plan_memory import plan_memory
from tests.support.families.quantised_cases import CASES
from tests.support.families.quantised_folder import write_pair

PUBLISHED = sorted((Path(__file__).parents[2] / "configs" / "models").glob("*.json"))
CPU = ModelConfig(device="cpu", num_threads=1)
GIB = 2**30


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Returns a function that sets the number of free bytes of this machine."""

    def set_free(count: int) -> None:
        monkeypatch.setattr(module, "free_bytes", lambda _: count)

    return set_free


@pytest.fixture
def published(tmp_path: Path) -> Callable[[str], ModelConfig]:
    def make(name: str) -> ModelConfig:
        (path,) = [path for path in PUBLISHED if path.stem == name]
        shutil.copy(path, tmp_path / "config.json")
        return replace(CPU, path=str(tmp_path))

    return make


def test_one_process_is_as_planned() -> None:
    """The plan has the engine's number of pages and the files' size of the weights."""
    config = EngineConfig(model=CPU, cache=CacheConfig(num_pages=300))
    plan, built = plan_memory(config), build_engine(config)
    (server,) = plan.processes
    assert (server.num_pages, server.kv_bytes) == (300, built.layout.kv_bytes)
    stored = sum(p.stat().st_size for p in built.layout.folder.glob("*.safetensors"))
    assert stored * 0.99 < server.weights <= stored
    (room,) = plan.rooms
    assert plan.needed(room) == server.total
    assert any("300 KV pages" in line for line in plan.lines())


@pytest.mark.parametrize("name", ["Kimi-K2-Thinking", "Mixtral-8x7B-Instruct-v0.1-AWQ"])
def test_packed_weights_are_as_large_as_stored(name: str, tmp_path: Path) -> None:
    """Weights of experts and of attention are counted once, even without a dtype in the config."""
    folder, _ = write_pair(tmp_path, CASES[name])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"dtype": None, "torch_dtype": None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    packed = replace(CPU, path=str(folder))
    stored = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    (server,) = plan_memory(EngineConfig(model=packed)).processes
    assert 0.8 * stored < server.weights <= stored, f"{stored} bytes are stored"
    floats = replace(packed, expert_weights="dequantised", linear_weights="dequantised")
    (server,) = plan_memory(EngineConfig(model=floats)).processes
    assert server.weights > 1.3 * stored, "they are expanded"


def test_a_layer_that_drafts_is_counted(
    published: Callable[[str], ModelConfig], free: Callable[[int], None]
) -> None:
    """DeepSeek-V3's has 11.5 B parameters of its own and 1/62 of the keys and values."""
    free(2**50)
    model, cache = published("DeepSeek-V3"), CacheConfig(num_pages=10_240)
    for cluster in (ClusterConfig(), ClusterConfig(attention_ranks=1, expert_ranks=1)):
        off, mtp = (
            plan_memory(
                EngineConfig(
                    model=model,
                    cache=cache,
                    cluster=cluster,
                    speculation=SpeculationConfig(method=method),
                )
            ).processes[0]
            for method in ("off", "mtp")
        )
        assert (mtp.weights - off.weights) / 2 == pytest.approx(11.5e9, rel=0.01)
        assert mtp.kv_bytes * 61 == off.kv_bytes * 62


def test_ranks_share_out_the_model(free: Callable[[int], None]) -> None:
    free(64 * GIB)
    alone = plan_memory(EngineConfig(model=CPU)).processes[0]
    cluster = ClusterConfig(attention_ranks=2, expert_ranks=3)
    plan = plan_memory(EngineConfig(model=CPU, cluster=cluster))
    names = ["attention-0", "attention-1", "expert-0", "expert-1", "expert-2"]
    assert [process.name for process in plan.processes] == names
    attention, experts = plan.processes[0], plan.processes[2:]
    assert attention.weights + sum(rank.weights for rank in experts) == alone.weights
    assert all(rank.kv_bytes == 0 < rank.buffers for rank in experts)
    assert 3 * experts[0].buffers == 2 * attention.buffers, "3 peers of one, 2 of the other"
    assert "dispatch buffers" in str(experts[0])
    limited = replace(CPU, expert_memory_bytes=1000)
    bounded = plan_memory(EngineConfig(model=limited, cluster=cluster))
    assert [rank.weights for rank in bounded.processes[2:]] == [1000] * 3


def test_slots_for_experts_that_move_are_planned(free: Callable[[int], None]) -> None:
    """Each of two expert ranks has 16 of 32 experts in 6 layers, and spare slots."""
    free(64 * GIB)
    cluster = ClusterConfig(attention_ranks=1, expert_ranks=2)

    def weights(**moving: Any) -> list[int]:
        of = EngineConfig(model=CPU, cluster=replace(cluster, **moving))
        return [rank.weights for rank in plan_memory(of).processes[1:]]

    (each, _) = weights()
    expert = each // (6 * 16)
    moving: dict[str, Any] = {
        "rebalance": "manual",
        "rebalance_spare_slots": 3,
        "rebalance_max_moves": 5,
    }
    assert weights(**moving) == [expert * (6 * (16 + 3) + 5)] * 2
    model = ClusterModel.read(EngineConfig(model=CPU, cluster=replace(cluster, **moving)))
    in_force = PlacementVersion(number=0, placement=model.placement, since=0.0)
    assert model.configure(RankName("expert", 1), in_force).num_slots == 6 * (16 + 3) + 5


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_models(
    path: Path, published: Callable[[str], ModelConfig], free: Callable[[int], None]
) -> None:
    """The plan needs only their configs. On 16 GiB a model fits or is refused in one sentence."""
    free(16 * GIB)
    model = replace(published(path.stem), max_model_len=4096)
    plan = plan_memory(EngineConfig(model=model, cache=CacheConfig(memory_bytes=64 * GIB)))
    assert plan.processes[0].weights > 0
    with pytest.raises(ConfigError, match=r"this machine has 16\.00 GiB free: .*\.$") as caught:
        plan.check()
    assert "\n" not in str(caught.value)


def test_what_is_said_where_it_does_not_fit(free: Callable[[int], None]) -> None:
    def refusal(config: EngineConfig) -> str:
        with pytest.raises(ConfigError) as caught:
            plan_memory(config).check()
        return str(caught.value)

    free(8 * 2**20)  # the weights alone are 31 MiB
    said = refusal(EngineConfig(model=CPU))
    assert "weights take 31.4 MiB" in said and "has 8.0 MiB free" in said
    assert "model.expert_memory_bytes" in said
    free(64 * 2**20)
    said = refusal(EngineConfig(model=CPU, cache=CacheConfig(num_pages=4096)))
    assert "4096 KV pages 0.19 GiB" in said and "give the KV cache less" in said
    small = EngineConfig(model=CPU, cache=CacheConfig(num_pages=256))
    plan_memory(small).check()
    cluster = ClusterConfig(attention_ranks=4, expert_ranks=1)
    assert "1024 KV pages" in refusal(replace(small, cluster=cluster)), "all ranks are here"
    plan = plan_memory(replace(small, cluster=cluster), has_local_ranks=False)
    assert plan.rooms == ()
    plan.check()


def test_pages_for_not_even_one_request(free: Callable[[int], None]) -> None:
    free(2**40)
    with pytest.raises(ConfigError, match="too small for one request of max_model_len"):
        plan_memory(EngineConfig(model=CPU, cache=CacheConfig(num_pages=2)))


def test_a_room_is_checked_with_its_own_users() -> None:
    processes = tuple(ProcessMemory(name=n, device="cuda", weights=10) for n in ("a", "b"))
    rooms = tuple(Room(name=f"GPU {n}", free=10, users=(n,)) for n in ("a", "b"))
    MemoryPlan(processes=processes, rooms=rooms).check()
    with pytest.raises(ConfigError, match="GPU b has"):
        MemoryPlan(processes=processes, rooms=(rooms[0], replace(rooms[1], free=9))).check()
    assert (gib(GIB), gib(3 * 2**20)) == ("1.00 GiB", "3.0 MiB")


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("0::/pod/it", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/pod/it",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_a_containers_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, names: tuple[str, str, str]
) -> None:
    root = tmp_path / "memory" if "memory" in line else tmp_path
    pod = root / "pod"
    (pod / "it").mkdir(parents=True)
    for place, most in ((pod, "5000"), (pod / "it", str(2**63 - 4096))):
        (place / names[0]).write_text(most)
        (place / names[1]).write_text("4000\n")
        (place / "memory.stat").write_text(f"anon 1\n{names[2]} 1500\n")
    texts = {"/proc/self/cgroup": f"9:cpu:/x\n{line}\n"}
    plain = free_memory._text
    monkeypatch.setattr(free_memory, "_text", lambda p: texts.get(str(p)) or plain(p))
    monkeypatch.setattr(free_memory, "_CGROUPS", tmp_path)
    assert free_bytes(torch.device("cpu")) == 5000 - (4000 - 1500)
    (pod / names[0]).write_text("max\n")
    assert free_bytes(torch.device("cpu")) > 2**20


def test_adapters_are_counted_and_refused_with_numbers(
    free: Callable[[int], None], tmp_path: Path
) -> None:
    """The bytes are those that the adapters take when they are loaded."""
    free(64 * GIB)
    folders = {
        name: demo_model_folder() / "adapters" / f"manual-{name}" for name in ("lora", "esft")
    }
    folders["bits"] = write_bits(tmp_path)
    for name, folder in folders.items():
        own = AdapterConfig(is_enabled=True, modules=(f"{name}={folder}",))
        config = EngineConfig(model=CPU, cache=CacheConfig(num_pages=300), adapters=own)
        (server,) = plan_memory(config).processes
        built = build_engine(config)
        assert built.adapters is not None
        loaded = built.adapters.stats.bytes_in_memory
        assert server.adapters == pytest.approx(loaded, rel=0.03), name
        cluster = ClusterConfig(attention_ranks=1, expert_ranks=2)
        ranks = plan_memory(replace(config, cluster=cluster)).processes
        assert sum(rank.adapters for rank in ranks) == pytest.approx(server.adapters, abs=1)
    limited = AdapterConfig(is_enabled=True, root=str(tmp_path), memory_bytes=3 * GIB)
    plan = plan_memory(EngineConfig(model=CPU, adapters=limited))
    assert plan.processes[0].adapters == 3 * GIB and "adapters 3.00 GiB" in plan.lines()[0]
    free(2 * GIB)
    with pytest.raises(ConfigError, match=r"adapters 3\.00 GiB.*limit them \(adapters.memory_byte"):
        plan_memory(EngineConfig(model=CPU, adapters=limited)).check()


def write_bits(root: Path) -> Path:
    """Writes a BitDelta of the demonstration model's routed experts of one layer."""
    tensors = {}
    for part, (rows, width) in {"gate": (96, 256), "up": (96, 256), "down": (256, 96)}.items():
        for expert in range(32):
            module = f"model.layers.2.mlp.experts.{expert}.{part}_proj"
            tensors[f"{module}.delta_sign"] = torch.zeros(rows, width // 8, dtype=torch.uint8)
            tensors[f"{module}.delta_scale"] = torch.ones(1)
    folder = root / "bits"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "bitdelta_config.json").write_text('{"format": "bitdelta", "version": 1}')
    return folder
