"""The metrics that gateways read of a server, by their names and labels, as each of them looks for
them. Its page in the documentation, docs/operate/gateways.md, has the same names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.http.full_metrics import full_metrics

PAGE = Path(__file__).resolve().parents[3] / "docs" / "operate" / "gateways.md"
LORA = {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
CACHE = {"block_size", "num_gpu_blocks"}
# Gauges by what the gateway takes from them, with the labels that it needs.
GATEWAYS: Mapping[str, Mapping[str, set[str]]] = {
    "Gateway API inference extension": {
        "vllm:num_requests_waiting": set(),
        "vllm:num_requests_running": set(),
        "vllm:kv_cache_usage_perc": set(),
        "vllm:lora_requests_info": LORA,
        "vllm:cache_config_info": CACHE,
    },
    "llm-d, told of our names": {
        "moe_serve:num_requests_waiting": set(),
        "moe_serve:num_requests_running": set(),
        "moe_serve:kv_cache_usage_perc": set(),
        "moe_serve:lora_requests_info": LORA,
        "moe_serve:cache_config_info": CACHE,
    },
}


@pytest.mark.parametrize("gateway", GATEWAYS)
def test_a_gateway_finds_what_it_reads(gateway: str) -> None:
    families = {
        family.name: family for family in text_string_to_metric_families(full_metrics("vllm"))
    }
    for name, labels in GATEWAYS[gateway].items():
        family = families[name]
        assert family.type == "gauge"
        (sample,) = family.samples
        assert labels <= sample.labels.keys(), f"{name} lacks {labels - sample.labels.keys()}"
    (info,) = families[f"{name.partition(':')[0]}:cache_config_info"].samples
    assert info.labels["block_size"] == "16" and int(info.labels["num_gpu_blocks"]) == 4
    (usage,) = families[f"{name.partition(':')[0]}:kv_cache_usage_perc"].samples
    assert usage.value == 0.5, "a share of 1, not per cent"


def test_the_page_names_them() -> None:
    shown = set(re.findall(r"\b(?:vllm|moe_serve):\w+", PAGE.read_text("utf-8")))
    assert {name for names in GATEWAYS.values() for name in names} <= shown
