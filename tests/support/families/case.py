"""One configuration of a family, to be compared with transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers
from torch import Tensor

VOCAB_SIZE = 300
TINY: dict[str, Any] = {  # what nearly every config calls the same
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model's configuration. `randomise(name, tensor)` may fill a tensor in place, and then
    returns True.

    `model_class`: for configs that AutoModelForCausalLM does not know (text beside vision).
    """

    config: transformers.PreTrainedConfig
    randomise: Callable[[str, Tensor], bool] | None = None
    model_class: type[transformers.PreTrainedModel] | None = None
