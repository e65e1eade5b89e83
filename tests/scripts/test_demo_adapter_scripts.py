"""The script that trains the example adapters: it writes files that the server reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from demo_model.adapters import TrainedAdapter, read_manual, some
from demo_model.network import Network, Shape

TINY = Shape(
    vocab_size=64, width=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    num_experts=4, top_k=2, expert_width=16, max_positions=64,
)  # fmt: skip
IDS = torch.arange(1, 17)[None]


def trained(experts: list[list[int]] | None) -> tuple[TrainedAdapter, float, float]:
    """Returns an adapter after a few steps, and the losses before and after them."""
    torch.manual_seed(1)
    network = Network(TINY)
    for name, parameter in network.named_parameters():
        if name.endswith(("moe.down", "attention.o")):  # they are zero at first
            torch.nn.init.normal_(parameter, std=0.2)
    before = loss_of(network).item()
    adapter = TrainedAdapter(network, experts, rank=4)
    optimizer = torch.optim.Adam(adapter.parameters, lr=0.05)
    for _ in range(4):
        torch.autograd.backward(loss_of(network))
        optimizer.step()
        optimizer.zero_grad()
    return adapter, before, loss_of(network).item()


def loss_of(network: Network) -> torch.Tensor:
    return network.loss(IDS[:, :-1], IDS[:, 1:])[0]


def test_a_lora(tmp_path: Path) -> None:
    adapter, before, after = trained(None)
    assert after < before
    adapter.save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 4)
    matrices = load_file(tmp_path / "adapter_model.safetensors")
    module = "base_model.model.model.layers.1.self_attn.k_proj"
    assert len(matrices) == 2 * 2 * 4
    assert matrices[f"{module}.lora_A.weight"].shape == (4, 32)
    assert matrices[f"{module}.lora_B.weight"].shape == (16, 4)


def test_an_esft(tmp_path: Path) -> None:
    adapter, before, after = trained([[0, 3], [1, 2]])
    assert after < before
    adapter.save(tmp_path)
    config = json.loads((tmp_path / "expert_cfg.json").read_text())
    assert config["experts"] == {"0": [0, 3], "1": [1, 2]}
    weights = load_file(tmp_path / "model.safetensors")
    assert len(weights) == 2 * 2 * 3
    assert weights["model.layers.1.mlp.experts.2.down_proj.weight"].shape == (32, 16)


def test_some_texts_are_spread_over_all() -> None:
    assert some(["aa", "bb", "cc", "dd"], 4) == ["aa", "cc"]


def test_each_fifth_page_of_a_manual_is_valid_text(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.md").write_text(str(number))
    assert read_manual(tmp_path) == (["1", "2", "3", "4"], ["0", "5"])
