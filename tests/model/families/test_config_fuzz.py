"""Wrong values in published configs give one sentence with the file's name, never a traceback."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.hf_config import HFConfig, generation_eos_token_ids
from moe_serve.model.rope import inverse_frequencies
from tests.support.families.published import published, spec_of

_NAMES = (
    "DeepSeek-V2-Chat",
    "ERNIE-4.5-21B-A3B-PT",
    "Hunyuan-A13B-Instruct",
    "Llama-4-Scout-17B-16E-Instruct",
    "MiniMax-M2",
    "Mistral-Small-4-119B-2603",
    "Qwen1.5-MoE-A2.7B",
    "gpt-oss-20b",
)
_WRONG: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2, 3.5, float("nan"), float("inf"), 10**400),
    *(1e308, 5e-324),
    *("", "x", [], [1], [None], {}, {"a": 1}, {"rope_type": "yarn"}),
)
_MORE_KEYS = (
    *("rope_parameters", "partial_rotary_factor", "layer_types", "mlp_layer_types", "moe_layers"),
    *("mlp_only_layers", "no_rope_layers", "attn_type_list", "text_config", "dtype", "head_dim"),
    *("first_k_dense_replace", "sliding_window_pattern", "quantization_config", "rope_scaling"),
)


@pytest.mark.parametrize("name", _NAMES)
def test_a_wrong_value_is_refused_in_a_sentence_or_harmless(name: str) -> None:
    original = published(name)
    before = copy.deepcopy(original)
    for where, values in _with_one_wrong_value(original):
        try:
            inverse_frequencies(spec_of(values).rope)
        except CheckpointError as error:
            message = str(error)
            assert message.startswith("config.json") and "\n" not in message, (where, message)
    assert original == before, "reading changes the config"


@pytest.mark.parametrize("text", ["[]", "", "{", "[" * 200_000, "\xff", "1"])
def test_files_that_hold_no_object_are_refused(text: str, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text(text, encoding="latin-1")
    for read in (HFConfig.read, generation_eos_token_ids):
        with pytest.raises(CheckpointError, match="JSON"):
            read(tmp_path)


def _with_one_wrong_value(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a config for every existing or possible key and every wrong value."""
    for inside in ("", *(key for key in ("text_config", "rope_scaling") if values.get(key))):
        part = values[inside] if inside else values
        for key in (*part, *_MORE_KEYS):
            for wrong in _WRONG:
                changed = part | {key: wrong}
                where = f"{inside}.{key} = {wrong!r}"
                yield where, values | {inside: changed} if inside else changed
