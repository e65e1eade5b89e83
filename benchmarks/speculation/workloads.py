"""Requests for speculation: prompts of several kinds, edited predictions and a schema."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.text.tokenizer import Tokenizer

Answers = Mapping[str, Sequence[int]]  # by request id
PROMPTS = (
    "The captain looked at the sea and said that",
    "In the year 1834 a young engineer came to the town of",
    "def read_file(path):\n    ",
    "class Server:\n    def __init__(self, host, port):\n",
    "Question: A farmer has 12 cows and buys 7 more. How many cows does he have?\nAnswer:",
    "Question: What is 15% of 80?\nAnswer:",
    "Il y avait une fois un roi qui",
    "La ville de Lyon est",
    "Die Vorschriften dieses Gesetzes gelten",
    "§ 12 Der Antrag ist bei der Behörde",
    "static int parse_header(struct buffer *in)\n{\n",
    "#include <stdio.h>\n\nint main(void)\n{\n",
    "The history of the province begins with",
    "Write a short letter to a friend about the garden.",
    "She opened the old letter and read",
    "The cell is the smallest unit of",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name_of_the_customer": {"type": "string", "maxLength": 12},
        "family_name_of_the_customer": {"type": "string", "maxLength": 12},
        "is_a_regular_customer": {"type": "boolean"},
        "number_of_previous_orders": {"type": "integer", "minimum": 0, "maximum": 999},
        "preferred_delivery_option": {"enum": ["standard", "express", "collected_in_store"]},
    },
    "required": [
        "first_name_of_the_customer",
        "family_name_of_the_customer",
        "is_a_regular_customer",
        "number_of_previous_orders",
        "preferred_delivery_option",
    ],
    "additionalProperties": False,
}


def natural(
    tokenizer: Tokenizer, batch: int, num_tokens: int, temperature: float, first: int = 0
) -> list[GenerationRequest]:
    """Requests that continue the prompts, each with its own seed."""
    return [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(tokenizer.encode(PROMPTS[(first + i) % len(PROMPTS)])),
            params=SamplingParams(
                max_tokens=num_tokens,
                temperature=temperature,
                seed=1000 + first + i,
                ignore_eos=True,
            ),
        )
        for i in range(batch)
    ]


def random_prompts(vocab_size: int, batch: int, num_tokens: int) -> list[GenerationRequest]:
    """Requests for a model with random weights."""
    rng = random.Random(batch)
    return [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(rng.randrange(vocab_size) for _ in range(16)),
            params=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
        )
        for i in range(batch)
    ]


def structured(tokenizer: Tokenizer, batch: int, first: int = 0) -> list[GenerationRequest]:
    """Requests for JSON with long keys."""
    form = Constraint("json_schema", json.dumps(SCHEMA))
    return [
        replace(
            request,
            params=replace(request.params, constraint=form, ignore_eos=False, temperature=0.7),
        )
        for request in natural(tokenizer, batch, 160, 0.7, first)
    ]


def with_predictions(
    requests: Sequence[GenerationRequest], answers: Answers, share: float, vocab_size: int
) -> list[GenerationRequest]:
    """Gives each request its own answer as the prediction, with a share of the tokens edited: each
    is replaced, left out, or another one is put before it."""
    rng = random.Random(round(1000 * share))
    found = []
    for request in requests:
        edited: list[int] = []
        for token in answers[request.request_id]:
            kind = rng.choice(("replace", "insert", "delete")) if rng.random() < share else "keep"
            edited += [rng.randrange(vocab_size)] if kind in ("replace", "insert") else []
            edited += [token] if kind in ("keep", "insert") else []
        found.append(replace(request, prediction=tuple(edited)))
    return found


def loops(token_ids: Sequence[int]) -> bool:
    """Returns whether the last 64 tokens repeat with a period of at most 32."""
    tail = list(token_ids[-64:])
    return any(
        all(tail[i] == tail[i - period] for i in range(period, len(tail)))
        for period in range(1, 33)
    )
