"""Clients do not affect each other: ids, cached prefixes, aborts, pages, salts."""

from __future__ import annotations

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from moe_serve.cache.page_key import following_keys, root_key, token_array
from tests.support.security.real_server import (
    BOTH,
    CHAT,
    MESSAGES,
    REFERENCE,
    TEXT,
    RealServer,
    refused,
)

OTHERS_ROUTES = (
    "/tokenizer_info", "/pause", "/resume", "/sleep", "/wake_up", "/scale_elastic_ep",
    "/is_scaling_elastic_ep", "/update_weights", "/update_weights_from_disk", "/collective_rpc",
    "/init_weights_update_group", "/start_profile", "/stop_profile", "/flush_cache", "/route",
    "/reset_prefix_cache", "/reset_mm_cache", "/load_lora_adapter", "/v1/load_lora_adapter",
    "/generate", "/encode", "/get_server_info", "/set_internal_state",
    "/inference/v1/generate", "/kv_transfer", "/register", "/register_to_bootstrap", "/rerank",
    "/admin", "/admin/shutdown", "/debug", "/docs", "/redoc", "/.env", "/v1/../admin/placement",
)  # fmt: skip


def stream_lines(server: RealServer, stop_after: int | None = None, **request: Any) -> list[str]:
    """Streams a text completion and leaves after some lines; returns them."""
    headers = request.pop("headers", {})
    body = {"prompt": "hi", "stream": True, "ignore_eos": True, **request}
    lines: list[str] = []
    with server.client.stream("POST", TEXT, json=body, headers=headers) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            lines += [line] if line else []
            if stop_after is not None and len(lines) >= stop_after:
                break
    return lines


def test_insides_are_not_on_the_public_port(server: RealServer) -> None:
    """CVE-2026-105754, PYSEC-2026-4353, CVE-2026-92972 (`PUT /route`), vLLM's open admin routes:
    messages between ranks, and from an operator to a server, have no route here."""
    for path in OTHERS_ROUTES:
        for method in ("GET", "POST", "PUT", "DELETE"):
            response = server.client.request(method, path)
            assert response.status_code in (403, 404, 405), f"{method} {path}"
            refused(response, response.status_code)
    (model,) = server.client.get("/v1/models").json()["data"]
    shown = server.client.get("/server_info").json()
    shown = {name: value for name, value in shown.items() if name not in ("version", "dp_size")}
    assert set(shown.values()) <= set(map(str, model.values())) | {model["max_model_len"]}, (
        "other servers show their settings there, with keys and paths"
    )
    for path in ("/admin/placement/rebalance", "/admin/trace/start", "/admin/anything"):
        assert refused(server.client.post(path), 403)["code"] == "admin_disabled"


def test_short_and_equal_ids_abort_nobody_else(server: RealServer) -> None:
    """CVE-2026-112266: an abort by a client's own id, or by its beginning, ends other requests."""
    ids = ("a", "ab", "abc", "cmpl", "cmpl-", "req-", "a")
    with ThreadPoolExecutor(len(ids)) as threads:
        stays = [
            threads.submit(stream_lines, server, max_tokens=60, headers={"x-request-id": name})
            for name in ids
        ]
        for name in ("a", "ab", "cmpl-", ""):
            headers = {"x-request-id": name}
            stream_lines(server, 2, max_tokens=1000, headers=headers, n=2)
        answers = [future.result() for future in stays]
    for lines in answers:
        assert lines[-1] == "data: [DONE]"
        reasons = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines[:-1]]
        assert reasons[-1] == "length", "somebody else's leaving ended it"


def test_ids_are_the_servers_own(server: RealServer) -> None:
    """CVE-2026-112266: a client's ids are shown and logged, but never looked up: two requests with
    one id run beside each other, and the end of one does not end the other."""
    same = {"request_id": "same", "user": "same", "headers": {"x-request-id": "same"}}
    with ThreadPoolExecutor(4) as threads:
        stays = [threads.submit(stream_lines, server, max_tokens=80, **same) for _ in range(3)]
        stream_lines(server, 3, max_tokens=1000, **same)
        for future in stays:
            lines = future.result()
            assert len(lines) > 80 / 16 and lines[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in lines[-2]
    engine_ids = [name for name in server.engine._queues if "same" in name]
    assert engine_ids == [], "the engine knows a request by a client's id"


def test_one_request_id_from_two_clients(server: RealServer) -> None:
    """CVE-2026-105755: the X-Request-Id is no key of any table."""
    headers = {"x-request-id": "one-id"}
    prompts = ["Once upon a time", "The king of the"] * 4
    alone = [server.text_of(prompt=prompt, temperature=0) for prompt in prompts]

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
        response = httpx.post(f"{server.url}{TEXT}", json=body, headers=headers, trust_env=False)
        return json.dumps(response.json()["choices"], sort_keys=True)

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(ask, prompts)) == alone


def test_many_prompts_and_choices_left_behind_give_all_pages_back(server: RealServer) -> None:
    """CVE-2026-94627: prompts of one request share pages, and the request is aborted midway."""
    for n, stop_after in ((4, 0), (4, 3), (1, 9), (7, 1)):
        prompts = ["Once upon a time there was a king " * 9, "Once upon a time", "x"]
        stream_lines(server, stop_after, prompt=prompts, n=n, max_tokens=300)
        server.check_unharmed()


def test_the_prompts_log_probabilities_are_never_old_memory(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CVE-2026-116180: this holds with a cached prefix, and if unwritten memory holds NaN."""
    real = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = real(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(77)

    prompt = "The king said to the queen that the night was long. " * 6
    body: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 5, "temperature": 0}
    cold = server.text_of(**body, cache_salt="first")
    assert server.text_of(**body, cache_salt="first") == cold, "with a cached prefix"
    monkeypatch.setattr(torch, "empty", poisoned)
    assert server.text_of(**body, cache_salt="first") == cold, "cached, memory poisoned"
    assert server.text_of(**body, cache_salt="second") == cold, "computed, memory poisoned"
    assert "NaN" not in cold and json.loads(cold)[0]["logprobs"]["token_logprobs"][0] is None


def cached_tokens(server: RealServer, **fields: Any) -> int:
    usage = server.post(TEXT, **fields).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_salt_hides_what_was_asked(server: RealServer) -> None:
    """CVE-2025-46570: the time of an answer reveals the prompts of others; with a salt it does
    not."""
    secret = "the password of the house by the sea is long " * 4
    cached_tokens(server, prompt=secret, cache_salt="tenant a")
    assert cached_tokens(server, prompt=secret, cache_salt="tenant a") > 16
    for salt in ("tenant b", "tenant a ", "tenant", "TENANT A", "a"):
        assert cached_tokens(server, prompt=secret, cache_salt=salt, user="tenant a") == 0
    assert cached_tokens(server, prompt=secret) == 0
    assert cached_tokens(server, prompt=secret, cache_salt="tenant a") > 16


def test_names_of_pages_do_not_collide(server: RealServer) -> None:
    """CVE-2025-25183, CVE-2025-46722: SHA-256 over model, adapter, salt and all tokens before,
    each with its length; not `hash()`, and no two ways to the same bytes."""
    one = b"1"
    parts = [(b"m", one, "1a"), (b"m1", one, "a"), (b"m", b"11", "a"), (b"m", one, "a")]
    parts += [(b"m\0", one, "a"), (b"m", b"", "a")]
    roots = {root_key(*part) for part in parts}
    assert len(roots) == len(parts) and all(len(key) == 32 for key in roots)
    rng = random.Random(3)
    keys: set[bytes] = set()
    for _ in range(300):
        tokens = [rng.choice([0, 1, 256, 65536]) for _ in range(16)]
        keys.add(following_keys(root_key(b"m", b"", ""), token_array(tokens), 16)[0])
    shifted = following_keys(root_key(b"m", b"", ""), np.arange(32, dtype="<i4"), 16)
    assert shifted[0] != shifted[1] and len(keys) > 290


def test_batches_that_change_at_every_step(server: RealServer) -> None:
    """GHSA-v97p-wpxp-px84, GHSA-fpch-3xrf-7q96: requests join, leave and end at any step; each gets
    the tokens and log probabilities that it gets alone, to the bit."""
    rng = random.Random(11)
    bodies = [
        {
            "prompt": [rng.randrange(3, 4096) for _ in range(rng.randint(1, 90))],
            "max_tokens": rng.randint(1, 24),
            "seed": i,
            "temperature": i % 2,
            "logprobs": 1,
            "ignore_eos": True,
            "frequency_penalty": rng.choice([0, 1.5]),
        }
        for i in range(16)
    ]
    alone = [server.text_of(**body, cache_salt=f"alone {i}") for i, body in enumerate(bodies)]
    with ThreadPoolExecutor(32) as threads:
        leavers = [
            threads.submit(stream_lines, server, rng.randint(0, 6), max_tokens=500, n=2)
            for _ in range(8)
        ]
        together = list(threads.map(lambda body: server.text_of(**body), bodies))
        for leaver in leavers:
            leaver.result()
    assert together == alone


def test_a_failing_neighbour_takes_nobody_with_it(server: RealServer) -> None:
    """CVE-2026-94622, CVE-2026-94570: the engine lives on when one request raises inside a step."""
    engine: Any = server.engine._engine
    executor = engine._executor
    real, poison = executor.run, 4001

    def run(plan: Any, *rest: Any) -> Any:
        for piece in plan.slices:
            if poison in piece.token_ids.tolist():
                raise RuntimeError("token 4001 is poison, says a test")
        return real(plan, *rest)

    executor.run = run
    try:
        with ThreadPoolExecutor(8) as threads:
            good = [threads.submit(server.text_of, **REFERENCE) for _ in range(6)]
            bad = [threads.submit(server.post, TEXT, prompt=[5, poison]) for _ in range(2)]
            for future in bad:
                assert refused(future.result(), 500)["code"] == "generation_failed"
            assert len({future.result() for future in good}) == 1
    finally:
        executor.run = real


def test_only_text_is_taken_and_nothing_is_fetched(server: RealServer) -> None:
    """CVE-2026-24779, CVE-2026-25960, CVE-2026-34753 (SSRF by media URL), CVE-2026-109229
    (decompression bombs): parts other than text are refused, and no address is contacted."""
    with socket.create_server(("127.0.0.1", 0)) as victim:
        victim.settimeout(0.2)
        port = victim.getsockname()[1]
        urls = (
            f"http://127.0.0.1:{port}/x",
            f"http://user@127.0.0.1:{port}\\@example.com/",
            f"http://0x7f000001:{port}/",
            f"http://[::ffff:127.0.0.1]:{port}/",
            "file:///etc/passwd",
            "data:image/png;base64,iVBORw0KGgo=",
        )
        for url in urls:
            parts: list[dict[str, Any]] = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "input_image", "image_url": url},
                {
                    "type": "input_audio",
                    "input_audio": {"data": "UklG", "format": "wav", "url": url},
                },
                {"type": "audio_url", "audio_url": {"url": url}},
                {"type": "video_url", "video_url": {"url": url}},
                {"type": "file", "file": {"file_id": url, "file_data": url}},
            ]
            for part in parts:
                content = [{"type": "text", "text": "hi"}, part]
                refused(server.post(CHAT, messages=[{"role": "user", "content": content}]), 400)
        for name in ("image_url", "media", "url", "callback", "webhook"):
            for route in BOTH:
                refused(server.post(route, **{name: urls[0]}), 400)
        with pytest.raises(TimeoutError):
            victim.accept()
    assert server.post(CHAT, messages=MESSAGES).status_code == 200
