"""Numbers, lists and ids that no model can follow give a 4xx, and the next client is unharmed."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.errors import InvalidRequestError
from tests.support.sampled_cases import EVERY_CASE
from tests.support.security.real_server import (
    BOTH,
    CHAT,
    REFERENCE,
    TEXT,
    RealServer,
    refused,
    whole_body,
)

ODD = (0, -1, 10**9, 1e308, "1", True, 1.5, -(2**63) - 1, 2**63, [], {})
LISTS = ("stop", "stop_token_ids", "logit_bias")
# What of ODD is a request like others; whatever is not here must be refused.
FINE: dict[str, tuple[Any, ...]] = {
    "seed": (0, -1, 10**9),
    "top_k": (0, -1, 10**9),
    "min_tokens": (0,),
    "logprobs": (0,),
    "priority": (0, 10**9),
    "temperature": (0, 1.5),
    "min_p": (0,),
    "presence_penalty": (0, -1, 1.5),
    "frequency_penalty": (0, -1, 1.5),
    "repetition_penalty": (1.5,),
    "stop": ("1", []),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
}
FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("n", "best_of", "max_tokens", "min_tokens", "seed", "top_k"), BOTH),
    "priority": BOTH,
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), BOTH),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), BOTH),
    **dict.fromkeys(LISTS, BOTH),
    "max_completion_tokens": (CHAT,),
    "top_logprobs": (CHAT,),
    "logprobs": (TEXT,),
    "prompt": (TEXT,),
    "messages": (CHAT,),
}


def is_fine(field: str, value: Any) -> bool:
    same = [fine for fine in FINE.get(field, ()) if type(fine) is type(value) and fine == value]
    return bool(same) or (field == "prompt" and value == "1")


@pytest.mark.parametrize("field", FIELDS)
def test_odd_numbers_in_any_field(server: RealServer, field: str) -> None:
    """CVE-2026-34756 (`n` without a bound), CVE-2026-21869 (negative numbers): in every field."""
    for route in FIELDS[field]:
        null = server.post(route, **{field: None})
        assert null.status_code in (200, 400), null.text
    for route, value in itertools.product(FIELDS[field], ODD):
        extra = {"logprobs": True} if field == "top_logprobs" else {}
        response = server.post(route, **extra, **{field: value})
        if is_fine(field, value) or (field == "top_logprobs" and value == 0 and value is not False):
            assert response.status_code == 200, f"{field} = {value!r}: {response.text}"
        else:
            error = refused(response, 400)
            assert field in error["message"] or field in str(error["param"]), f"{value!r}: {error}"


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "0x10", "1e308", "9" * 400])
def test_numbers_that_are_none(server: RealServer, number: str) -> None:
    """CVE-2026-34756, CVE-2026-93989: NaN and infinity are not JSON, even deep in a field."""
    for field in ("n", "max_tokens", "temperature", "seed"):
        raw = b'{"prompt": "hi", "%s": %s}' % (field.encode(), number.encode())
        refused(server.post_raw(TEXT, raw), 400)
    for value in (b'{"1": %s}', b'{"%s": 1}'):
        raw = b'{"prompt": "hi", "logit_bias": ' + value % number.encode() + b"}"
        refused(server.post_raw(TEXT, raw), 400)


def test_more_log_probabilities_than_the_sampler_has(server: RealServer) -> None:
    """CVE-2026-116173, PYSEC-2026-4350: capped before the engine, and once more inside."""
    for count in (21, 129, 4096, 10**6):
        refused(server.post(TEXT, logprobs=count), 400)
        refused(server.post(TEXT, logprobs=count, echo=True), 400)
        refused(server.post(CHAT, logprobs=True, top_logprobs=count), 400)
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(InvalidRequestError, match="logprobs must be in"):
                SamplingParams(**{name: count})  # type: ignore[arg-type]
    assert server.post(TEXT, logprobs=20, n=4).status_code == 200


@pytest.mark.parametrize("token", [-1, 4096, 2**31, 2**63, "x", "NaN", "1.0", None, True])
def test_token_ids_outside_the_vocabulary(server: RealServer, token: Any) -> None:
    """CVE-2026-93989: an id out of range would write into other rows; neighbours stay."""
    assert server.vocab_size == 4096, "the smallest id outside is one of the cases"
    with ThreadPoolExecutor(2) as threads:
        neighbour = threads.submit(server.text_of, **REFERENCE)
        refused(server.post(TEXT, stop_token_ids=[5, token]), 400)
        refused(server.post(TEXT, logit_bias={str(token): -100}), 400)
        refused(server.post(TEXT, prompt=[5, token]), 400)
        refused(server.post(TEXT, bad_words=[[token]]), 400)
        refused(server.post(TEXT, allowed_token_ids=[token]), 400)
        assert neighbour.result() == server.text_of(**REFERENCE)


SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 2,
    "frequency_penalty": -2,
    "repetition_penalty": 1.3,
    "logit_bias": {"7": 50, "8": -100},
    "stop": ["e"],
    "stop_token_ids": [9],
    "ignore_eos": True,
    "min_tokens": 3,
    "logprobs": 3,
    "n": 2,
    "echo": True,
}


def test_every_pair_of_parameters_in_one_batch(server: RealServer) -> None:
    """CVE-2026-44223, PYSEC-2026-145: a penalty of one row must not crash or change others."""
    pairs = list(itertools.combinations(SAMPLING, 2))
    bodies = [
        {"seed": i, **{name: SAMPLING[name] for name in pair}} for i, pair in enumerate(pairs)
    ]
    with ThreadPoolExecutor(48) as threads:
        together = list(threads.map(lambda body: server.text_of(**body), bodies))
    for place in range(0, len(bodies), 5):
        assert server.text_of(**bodies[place]) == together[place], f"{pairs[place]} in company"


def test_long_lists_of_everything(server: RealServer) -> None:
    """CVE-2026-34756: lists within the largest body are refused by their length."""
    lists: dict[str, Any] = {
        "stop": ["x"] * 100_000,
        "stop_token_ids": [1] * 100_000,
        "logit_bias": {str(i): 0 for i in range(100_000)},
        "prompt": ["x"] * 100_000,
    }
    for field, value in lists.items():
        assert refused(server.post(TEXT, **{field: value}), 400)["param"].startswith(field)
    refused(server.post(CHAT, messages=[{"role": "user", "content": "x"}] * 100_000), 400)
    refused(server.post(TEXT, prompt=["x"] * 64, n=64), 400)


def test_fields_of_other_servers_insides(server: RealServer) -> None:
    """CVE-2026-94622 (`kv_transfer_params` that lacks a key), CVE-2025-62164, CVE-2026-56340,
    CVE-2026-73557, PYSEC-2026-2303 (tensors in requests), CVE-2026-114053 (`code_revision`):
    internal fields of other servers are unknown here, whole or in part."""
    partial = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1]]}
    values: list[Any] = [{}, [], "x", "gASV", 1, True, {"a": {}}]
    values += [{name: partial[name]} for name in partial] + [partial]
    names = (
        "kv_transfer_params", "prompt_embeds", "input_embeds", "image_data", "rid",
        "bootstrap_host", "bootstrap_room", "session_params", "lora_path", "vllm_xargs",
        "data_parallel_rank", "custom_logit_processor", "custom_params", "return_hidden_states",
        "mm_processor_kwargs", "code_revision", "revision", "trust_remote_code", "n_discard",
        "tokenizer", "adapter", "cache_transfer",
    )  # fmt: skip
    for number, name in enumerate(names):
        for value in values if EVERY_CASE else values[number % 4 :: 4]:
            error = refused(server.post(TEXT, **{name: value}), 400)
            assert error["param"] == name
            assert error["code"] in ("unknown_parameter", "unsupported_parameter")
            refused(server.post(CHAT, **{name: value}), 400)


def test_one_field_twice_is_one_field(server: RealServer) -> None:
    """Parser differences (CVE-2026-25960): the value that was checked is the value that is used."""
    raw = b'{"prompt": "hi", "max_tokens": 3, "n": 1000, "n": 1}'
    response = server.post_raw(TEXT, raw)
    assert response.status_code == 200 and len(response.json()["choices"]) == 1
    refused(server.post_raw(TEXT, b'{"prompt": "hi", "n": 1, "n": 1000}'), 400)


def test_the_same_answer_is_what_a_null_gives(server: RealServer) -> None:
    """CVE-2026-34756: null means the default, and does not bypass a bound."""
    fields = whole_body(TEXT, dict.fromkeys(SAMPLING, None) | {"seed": 3})
    answer = server.client.post(TEXT, json=fields)
    assert json.loads(server.text_of(seed=3)) == answer.json()["choices"]


def test_a_body_of_a_million_requests_is_cheap(server: RealServer) -> None:
    """CVE-2026-34756: other clients do not wait while a hostile body is checked."""
    with ThreadPoolExecutor(4) as threads:
        bodies = [{"prompt": [1] * 900_000}, {"prompt": [[1]] * 400_000}]
        hostile = [threads.submit(server.client.post, TEXT, json=body) for body in bodies]
        responses: list[httpx.Response] = [future.result() for future in hostile]
    for response in responses:
        refused(response, 400, 413)
