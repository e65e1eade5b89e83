"""Published hardware: files, model shapes, experts that are activated, and the bound of a step."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_serve.errors import ConfigError
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks
from moe_serve.pipeline.costs.step_seconds import step_seconds
from moe_serve.simulate.catalogue import find_device, find_model
from moe_serve.simulate.costs.device import DeviceType, Efficiency, read_device
from moe_serve.simulate.costs.model_shape import ModelShape, read_model_shape
from moe_serve.simulate.costs.roofline import RooflineCosts
from moe_serve.simulate.costs.routing_law import EvenRouting, RecordedRouting
from moe_serve.simulate.layout import Layout
from routing_predictor.traces.load_file import RecordedLoad, write_load

H100 = read_device(find_device("h100"))
QWEN = read_model_shape(find_model("qwen3-235b"), "fp8")


def costs(
    text: str, devices: int, shards: int = 1, device: DeviceType = H100, model: ModelShape = QWEN
) -> RooflineCosts:
    layout = Layout.parse(text, devices, shards)
    return RooflineCosts(model, device, layout, EvenRouting(model.num_experts, model.top_k))


def test_every_published_device_is_read() -> None:
    folder = find_device("h100").parent
    devices = [read_device(path) for path in sorted(folder.glob("*.yaml"))]
    assert len(devices) >= 9
    assert all(
        device.name == path.stem
        for device, path in zip(devices, sorted(folder.glob("*.yaml")), strict=True)
    )


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("qwen3-235b", 235, 192_512),
        ("qwen3-30b-a3b", 30.5, 98_304),
        ("deepseek-v3", 671, 70_272),
        ("mixtral-8x22b", 141, 229_376),
        ("gpt-oss-120b", 117, 73_728),
    ],
)
def test_shapes_have_the_published_sizes(name: str, billions: float, kv_bytes: int) -> None:
    size = read_model_shape(find_model(name), "bfloat16").size
    total = (size.attention_bytes + size.expert_bytes) / 2e9
    assert total == pytest.approx(billions, rel=0.015)
    assert size.kv_token_bytes == kv_bytes


def test_a_step_of_one_device_by_hand() -> None:
    """At a share of 1, without launches: the bytes of a decode step of 1 row, read once."""
    ideal = Efficiency(gemm=1, attention=1, memory=1, link=1, launch_us=0, host_ms=0)
    device = replace(H100, efficiency=ideal)
    layer, load = QWEN.layers[0], BatchLoad.decode(1, 1000)
    rows = 4 * QWEN.width * 2
    projections = layer.num_weights + rows
    kv = 1000 * layer.kv_values * 2
    experts = 8 * QWEN.expert_weights + 8 * rows
    num_bytes = 94 * (projections + kv + experts) + QWEN.head_weights * 2
    seconds = costs("replicas", 1, device=device).colocated_time(load)
    assert seconds == pytest.approx(num_bytes / 3.35e12, rel=1e-6)


def test_fitted_shares_only_make_steps_slower() -> None:
    ideal = Efficiency(gemm=1, attention=1, memory=1, link=1, launch_us=0, host_ms=0)
    bound = replace(H100, efficiency=ideal, link_latency_us=0)
    for text, devices, shards in (("colocated", 8, 1), ("2A6E", 8, 1), ("colocated", 8, 4)):
        ranks = Ranks(num_attention=2, num_experts=6)
        for rows in (1, 64, 512):
            loads = [[BatchLoad.decode(rows, 2048)] * 2]
            fitted, bare = (
                step_seconds(costs(text, devices, shards, device).layer_times(loads, ranks))
                for device in (H100, bound)
            )
            assert fitted > bare > 0


def test_decode_steps_have_the_rows_of_a_captured_graph() -> None:
    """Nine rows cost the arithmetic of sixteen and the bytes of nine; prompts are no graphs."""
    slow = replace(H100, bf16_tflops=0.1, fp8_tflops=0.1)  # arithmetic decides
    free = replace(slow, has_graphs=False)
    nine, sixteen = BatchLoad.decode(9, 64), BatchLoad.decode(16, 64)

    def seconds(device: DeviceType, load: BatchLoad) -> float:
        return costs("replicas", 1, device=device).colocated_time(load)

    head_s = 7 * 2 * QWEN.head_weights / (0.1e12 * H100.efficiency.gemm)  # of the other sequences
    assert seconds(slow, nine) == pytest.approx(seconds(slow, sixteen) - head_s, rel=1e-3)
    assert seconds(free, nine) < 0.6 * seconds(free, sixteen)
    memory_bound = BatchLoad.decode(9, 4000)
    assert seconds(H100, memory_bound) < 1.02 * seconds(
        replace(H100, has_graphs=False), memory_bound
    )
    prompt = BatchLoad.of_parts([0], [9])
    assert seconds(slow, prompt) == seconds(free, prompt)
    idle = costs("colocated", 2, device=slow).layer_times(
        [[nine, BatchLoad.decode(0, 0)]], Ranks(num_attention=2, num_experts=2)
    )
    assert idle[0].attention_s[0] > 0, "a rank without sequences has no graph"


def test_sums_over_two_nodes_cross_the_network_once_for_each_node() -> None:
    """Sixteen shards: a ring within each node of eight, and a tree of two nodes, up and down."""
    one = BatchLoad.decode(8, 64)
    short, long = (
        costs("colocated", 16, 16, replace(H100, link_latency_us=us)).colocated_time(one)
        for us in (0.0, 10.0)
    )
    assert long - short == pytest.approx(94 * 2 * 3 * 10e-6, rel=1e-6)


def test_shards_and_more_devices_shorten_a_large_step() -> None:
    load = BatchLoad.decode(256, 8192)
    times = [costs("replicas", n, n).colocated_time(load) for n in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("name", ["qwen3-235b", "gpt-oss-120b", "deepseek-v3"])
def test_one_rank_takes_the_sum_of_its_layers(name: str, shards: int) -> None:
    """The short way of one rank agrees with that of all layouts, to the last bit."""
    own = costs("replicas", shards, shards, model=read_model_shape(find_model(name), "fp8"))
    prompts = BatchLoad.of_parts([0, 700, 300], [512, 1, 1])
    for load in (prompts, *(BatchLoad.decode(n, 37 * n + 500) for n in (1, 3, 9, 64, 200))):
        times = own.layer_times([[load]], Ranks(num_attention=1, num_experts=1))
        assert own.colocated_time(load) == step_seconds(times) + own.fixed_seconds([load])


def test_activated_experts() -> None:
    even = EvenRouting(128, 8)
    assert even.num_activated(1) == pytest.approx(8)
    assert even.num_activated(16) == pytest.approx(128 * (1 - (1 - 8 / 128) ** 16))
    flat = RecordedRouting(np.full((3, 128), 8 / 128))
    skewed = RecordedRouting(np.repeat([[0.5] * 8 + [4 / 120] * 120], 3, axis=0))
    assert flat.num_activated(16) == pytest.approx(even.num_activated(16))
    assert flat.imbalance(4) == pytest.approx(1)
    assert skewed.num_activated(16) < flat.num_activated(16)
    assert skewed.imbalance(4) == pytest.approx((8 * 0.5 + 24 * 4 / 120) / 2)


def test_experts_placed_by_their_loads_even_the_ranks() -> None:
    """In order 6 and 2; by loads 5 and 3; with two copies of the first, 4.33 and 3.67."""
    law = RecordedRouting(np.array([[0.4, 0.2, 0.1, 0.1]]))
    found = [law.imbalance(2, num) for num in (None, 0, 2)]
    assert found == pytest.approx([6 / 4, 5 / 4, (13 / 3) / 4])
    again = copy.deepcopy(law)  # by its __reduce__, as processes get it
    assert [again.imbalance(2, num) for num in (None, 0, 2)] == found
    assert again.num_activated(3) == law.num_activated(3)
    plain = Layout.parse("colocated", 16)
    held = [replace(plain, num_redundant=num).num_held(128) for num in (None, 0, 16)]
    assert held == [8, 8, 9]
    sizes = [QWEN.size.device_bytes(replace(plain, num_redundant=n))[0] for n in (None, 16)]
    assert sizes[1] - sizes[0] == pytest.approx(QWEN.size.expert_bytes / 128)


def test_a_trace_of_another_model_is_refused(tmp_path: Path) -> None:
    load = RecordedLoad(counts_SLE=np.ones((1, 2, 64)), layers=(0, 1))
    write_load(load, tmp_path / "load.safetensors")
    with pytest.raises(ConfigError, match="among 64 experts in a layer, but the model has 128"):
        RecordedRouting.read(tmp_path / "load.safetensors", 128, 8)
    read = RecordedRouting.read(tmp_path / "load.safetensors", 64, 4)
    assert read.num_activated(1) == pytest.approx(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("memory_gb: 0", "memory_gb must be greater than 0 and finite, got 0"),
        ("memory_gb: fast", "does not describe a device: Expected `float"),
        ("efficiency: {gemm: 1.5}", r"efficiency.gemm must be in \(0, 1\], got 1.5"),
        ("link_latency_us: -1", "link_latency_us must be 0 or more"),
        ("- 1", "does not describe a device"),
    ],
)
def test_wrong_device_files_are_refused(tmp_path: Path, change: str, message: str) -> None:
    lines = find_device("h100").read_text("utf-8").splitlines()
    kept = [line for line in lines if not line.startswith(change.partition(":")[0])]
    path = tmp_path / "own.yaml"
    path.write_text("\n".join([*kept, change]), "utf-8")
    with pytest.raises(ConfigError, match=message):
        read_device(path)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="device 'tpu' is neither a file nor one of: a100-sxm, "):
        find_device("tpu")
    with pytest.raises(ConfigError, match="'qwen3' is the beginning of several: Qwen3-235B-A22B, "):
        find_model("qwen3")


def test_prompts_of_latent_attention_are_expanded_where_that_is_less_work() -> None:
    """Per pair of DeepSeek-V3's row and key, 320 values are multiplied in place of 1 088. Decode
    would have to expand all cached tokens in each step."""
    model = read_model_shape(find_model("deepseek-v3"), "fp8")
    layout = Layout.parse("colocated", 8, 8)
    routing = EvenRouting(model.num_experts, model.top_k)
    absorbed, expanded = (
        RooflineCosts(model, H100, layout, routing, expands_latents=each) for each in (False, True)
    )
    long, short = (BatchLoad.of_parts([0], [rows]) for rows in (16_384, 64))
    assert expanded.colocated_time(long) < 0.8 * absorbed.colocated_time(long)
    assert expanded.colocated_time(short) <= absorbed.colocated_time(short)
    decode = BatchLoad.decode(64, 4096)
    assert expanded.colocated_time(decode) == absorbed.colocated_time(decode)
    form = model.layers[0].expanded
    assert form is not None and form.pair_flops == 2 * 128 * 320
    assert form.token_flops == 2 * 128 * 512 * 256
    assert QWEN.layers[0].expanded is None
