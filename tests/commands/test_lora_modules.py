"""vLLM's way to list adapters after one flag."""

from __future__ import annotations

import pytest

from moe_serve.cli.serve.adapter_options import spread_modules


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("m --lora-modules a=x b=y --port 1", "m --lora-modules a=x --lora-modules b=y --port 1"),
        ("--lora-modules a=x model", "--lora-modules a=x model"),
        ("--lora-modules a=x --lora-modules b=y", "--lora-modules a=x --lora-modules b=y"),
        ("--lora-modules=a=x b=y", "--lora-modules=a=x b=y"),
        ("model a=b", "model a=b"),
    ],
)
def test_a_flag_before_each_adapter(given: str, wanted: str) -> None:
    assert spread_modules(given.split()) == wanted.split()
