"""Keys from a file that changes, and the limits of one key."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.cli.server_client import sent_key
from moe_serve.config.sections import ServerConfig
from moe_serve.errors import ConfigError
from moe_serve.http.gate import auth
from moe_serve.http.gate.auth import KeyRing, KeySettings
from moe_serve.http.gate.key_limits import Allowance, KeyAccount

MakeApp = Callable[..., FastAPI]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the gate look at the file for every request."""
    monkeypatch.setattr(auth, "_LOOK_S", 0.0)


def write(path: Path, text: str) -> None:
    """Writes as an editor does: a new file replaces the old one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_file_of_keys_is_read_again(make_app: MakeApp, tmp_path: Path, eager: None) -> None:
    file = tmp_path / "keys"
    file.write_text("# team one\none\n\ntwo\n")
    client = TestClient(make_app(api_keys=("fixed",), api_key_file=str(file)))

    def statuses(*keys: str) -> list[int]:
        return [client.get("/v1/models", headers=bearer(key)).status_code for key in keys]

    assert statuses("fixed", "one", "two", "three", "# team one", "") == [200] * 3 + [401] * 3
    write(file, "two\nthree\n")
    assert statuses("fixed", "one", "two", "three") == [200, 401, 200, 200]
    assert client.get("/v1/models", headers={"X-Api-Key": "two"}).status_code == 200
    assert client.get("/v1/models", headers={"X-Api-Key": "one"}).status_code == 401


def test_half_a_file_changes_nothing(
    tmp_path: Path, eager: None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("secret-one\n")
    ring = KeyRing((), str(file))
    for text in ("# nobody\n", ""):
        write(file, text)
        assert ring.find(b"secret-one") is not None
    file.unlink()
    assert ring.find(b"secret-one") is not None
    assert caplog.text.count("the API keys stay unchanged") == 3
    assert "secret-one" not in caplog.text
    write(file, "secret-two\n")
    assert ring.find(b"secret-one") is None and ring.find(b"secret-two") is not None
    with pytest.raises(ConfigError, match="cannot read the API keys"):
        KeyRing((), str(tmp_path / "missing"))


def test_keys_of_any_length_are_compared(make_app: MakeApp) -> None:
    client = TestClient(make_app(api_keys=("k" * 32,)))
    for key in ("k", "k" * 31, "k" * 33, "k" * 5000):
        assert client.get("/v1/models", headers=bearer(key)).status_code == 401
    assert client.get("/v1/models", headers=bearer("k" * 32)).status_code == 200


@pytest.mark.parametrize("key", ["clé", "voilà", "Å"])
def test_keys_may_be_any_text(make_app: MakeApp, key: str) -> None:
    """Headers carry keys in UTF-8: the last bytes of "à" and "Å" are blanks in Latin-1."""
    client = TestClient(make_app(api_keys=(key,)))
    for headers in ({"Authorization": f"Bearer  {key} "}, {"X-Api-Key": f" {key}"}):
        sent = {name: value.encode() for name, value in headers.items()}
        assert client.get("/v1/models", headers=sent).status_code == 200


def test_an_allowance_comes_back_evenly() -> None:
    allowance = Allowance(60, now=0.0)
    for _ in range(60):
        assert allowance.seconds_until(1, 0.0) == 0.0
        allowance.spend(1, 0.0)
    assert allowance.seconds_until(1, 0.0) == pytest.approx(1.0)
    assert allowance.seconds_until(1, 1.0) == 0.0
    assert allowance.left(1000.0) == 60.0, "no more than a minute's worth"
    allowance.spend(90, 1000.0)
    assert allowance.seconds_until(1, 1000.0) == pytest.approx(31.0)


def test_an_account_says_what_is_used_up() -> None:
    config = ServerConfig(key_max_concurrent=1, key_requests_per_minute=2, key_tokens_per_minute=10)
    account = KeyAccount(config, 0.0)

    def reason(now: float) -> str | None:
        refused = account.begin(now)
        return None if refused is None else refused.reason

    assert reason(0.0) is None
    assert reason(0.0) == "key_concurrent"
    account.end()
    account.charge(100, 0.0)
    assert reason(0.0) == "key_tokens"
    assert reason(600.0) is None
    account.end()
    assert reason(600.0) is None
    account.end()
    assert reason(600.0) == "key_requests"


def test_requests_per_minute_by_key(make_app: MakeApp) -> None:
    client = TestClient(make_app(api_keys=("one", "two"), key_requests_per_minute=2))

    def ask(key: str, **fields: Any) -> httpx.Response:
        return client.post("/v1/completions", json={"prompt": "hi", **fields}, headers=bearer(key))

    assert [ask("one").status_code for _ in range(2)] == [200, 200]
    refused = ask("one", stream=True)
    error = refused.json()["error"]
    assert refused.status_code == 429
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert "its 2 requests per minute" in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-should-retry"] == "true"
    assert ask("two").status_code == 200, "another key has its own"
    assert ask("wrong").status_code == 401, "who is not let in is not counted"
    assert client.get("/v1/models", headers=bearer("one")).status_code == 200
    messages = client.post("/v1/messages", json={}, headers={"x-api-key": "one"})
    assert messages.status_code == 429 and messages.json()["type"] == "error"
    text = client.get("/metrics", headers=bearer("two")).text
    assert 'admission_rejections_total{model_name="tiny",reason="key_requests"} 2.0' in text
    assert "one" not in text.split(), "no key is a label"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/tokenize", {"prompt": "hi"}),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_what_generates_nothing_counts_too(
    make_app: MakeApp, path: str, body: dict[str, Any]
) -> None:
    client = TestClient(
        make_app(api_keys=("one", "two"), admin_keys=("chief",), key_requests_per_minute=2)
    )
    asked = [client.post(path, json=body, headers=bearer("one")) for _ in range(3)]
    assert [answer.status_code for answer in asked] == [200, 200, 429]
    assert asked[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert client.post(path, json=body, headers=bearer("two")).status_code == 200
    for _ in range(3):  # no key of a client, and no limit of one
        admin = client.post("/admin/placement/rebalance", headers=bearer("chief"))
        assert admin.status_code not in (401, 429)
    cancelled = client.post("/v1/responses/resp_1/cancel", headers=bearer("one"))
    assert cancelled.status_code == 404, "cancelling makes room"


def test_tokens_are_charged_when_an_answer_ends(make_app: MakeApp) -> None:
    client = TestClient(make_app(api_keys=("one",), key_tokens_per_minute=40))
    body = {"prompt": "x" * 30, "max_tokens": 8, "n": 3}  # 30 + 3 times at most 6 tokens
    assert client.post("/v1/completions", json=body, headers=bearer("one")).status_code == 200
    refused = client.post("/v1/completions", json=body, headers=bearer("one"))
    assert refused.status_code == 429
    assert "has used its 40 tokens per minute" in refused.json()["error"]["message"]


def test_open_requests_of_a_key(make_app: MakeApp, engine: Any) -> None:
    """Two streams are open, so a third request is refused at once. When they end, there is room
    again."""
    engine.gate = asyncio.Event()
    app = make_app(key_max_concurrent=2)

    async def run() -> tuple[list[int], int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            body = {"prompt": "hi", "stream": True}
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)
            ]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            engine.gate.set()
            answers = await asyncio.gather(*asked)
            later = await client.post("/v1/completions", json=body)
        return sorted(answer.status_code for answer in answers), later.status_code

    assert asyncio.run(run()) == ([200, 200, 429], 200)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 128}),
        ("/v1/chat/completions", {**CHAT, "n": 4, "stream": True}),
        ("/v1/completions", {"prompt": "hi", "n": 128}),
        ("/v1/completions", {"prompt": "hi", "n": 4, "best_of": 4, "stream": True}),
        ("/v1/completions", {"prompt": ["hi"] * 4}),
        ("/v1/completions", {"prompt": [[1], [2]], "n": 2}),
    ],
)
def test_choices_and_prompts_count_for_a_key(
    make_app: MakeApp, engine: Any, path: str, body: dict[str, Any]
) -> None:
    """A request above the key's limit is told that it is wrong, not that it may try again later."""
    client = TestClient(make_app(key_max_concurrent=3))
    refused = client.post(path, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "n"), error
    assert "may have at most 3 at once" in error["message"] and not engine.submitted
    client = TestClient(make_app(key_max_concurrent=128))
    for _ in range(3):
        assert client.post(path, json=body).status_code == 200, "all of it is given back"


@pytest.mark.parametrize("has_failed", [False, True])
def test_sequences_of_a_key_are_given_back(
    make_app: MakeApp, engine: Any, has_failed: bool
) -> None:
    """A stream whose client leaves and a request that the engine refuses give them back too."""
    app = make_app(key_max_concurrent=4)
    three = {"prompt": "hi", "n": 3, "stream": True}

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:

            async def ask(body: dict[str, Any]) -> int:
                return (await client.post("/v1/completions", json=body)).status_code

            engine.max_requests, engine.gate = 2 if has_failed else 1000, asyncio.Event()
            statuses = [await ask(three)] if has_failed else []
            engine.max_requests = 1000
            open_one = asyncio.create_task(ask(three))
            while len(engine.submitted) < 3:
                await asyncio.sleep(0.001)
            statuses.append(await ask({"prompt": "hi", "n": 2}))
            open_one.cancel()
            await asyncio.wait({open_one})
            engine.gate.set()
            return [*statuses, await ask({"prompt": "hi", "n": 4})]

    assert asyncio.run(run()) == ([429, 429, 200] if has_failed else [429, 200])


def test_sequences_of_two_requests_add_up() -> None:
    account = KeyAccount(ServerConfig(key_max_concurrent=4), 0.0)
    assert account.begin(0.0) is None and account.claim(3) is None
    assert account.begin(0.0) is None
    refused = account.claim(2)
    assert refused is not None and refused.reason == "key_concurrent"
    assert refused.message == (
        "This API key has 3 sequences open and requests 2 more; its limit is 4"
    )
    account.end()
    account.release(3)
    account.end()
    for _ in range(4):
        assert account.begin(0.0) is None
    assert account.begin(0.0) is not None


@pytest.mark.parametrize(("fields", "status"), [({}, 429), ({"overload_status": 503}, 503)])
def test_the_status_of_a_full_queue(
    make_app: MakeApp, engine: Any, fields: dict[str, int], status: int
) -> None:
    engine.max_requests = 0
    client = TestClient(make_app(**fields))
    response = client.post("/v1/completions", json={"prompt": "hi"})
    assert response.status_code == status
    assert response.json()["error"]["code"] == "server_overloaded"
    assert response.headers["retry-after"] == "1"


def test_keys_are_never_logged(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = TestClient(make_app(api_keys=("swordfish",)))
    for key in ("swordfish", "swordfish2"):
        client.post("/v1/completions?key=swordfish", json={"prompt": "a"}, headers=bearer(key))
    ours = [r.getMessage() for r in caplog.records if r.name.startswith(("moe_serve", "uvicorn"))]
    assert not any("swordfish" in line for line in ours)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", CHAT)]
)
def test_a_client_cannot_pass_the_others(
    make_app: MakeApp, engine: Any, path: str, body: dict[str, Any]
) -> None:
    """A client may make its own requests less urgent, never more."""
    client = TestClient(make_app())
    for priority in (-1, -(2**31)):
        refused = client.post(path, json={**body, "priority": priority})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "priority")
        assert f"in [0, 2147483647] for this client, got {priority}" in error["message"]
    assert not engine.submitted
    for priority, used in ((0, 0), (7, 7), (None, 0)):
        assert client.post(path, json={**body, "priority": priority}).status_code == 200
        assert engine.submitted[-1].priority == used


def test_priorities_by_key(make_app: MakeApp, engine: Any, tmp_path: Path, eager: None) -> None:
    file = tmp_path / "keys"
    file.write_text("urgent\tmin_priority=-3  # the chat\nbatch min_priority=5\nplain\n")
    config = {"api_keys": ("fixed min_priority=-9", "two words"), "key_min_priority": -1}
    client = TestClient(make_app(**config, api_key_file=str(file)))

    def used(key: str, priority: int | None) -> int | None:
        """Returns the priority in the engine, or None if the request is refused."""
        body = {"prompt": "hi", "priority": priority}
        answer = client.post("/v1/completions", json=body, headers=bearer(key))
        assert answer.status_code in (200, 400), answer.text
        return engine.submitted[-1].priority if answer.status_code == 200 else None

    assert [used("urgent", priority) for priority in (-3, -4, None)] == [-3, None, 0]
    assert [used("batch", priority) for priority in (5, 4, 0, None)] == [5, None, None, 5]
    assert [used("plain", priority) for priority in (-1, -2)] == [-1, None]
    assert [used("fixed", priority) for priority in (-9, -10)] == [-9, None]
    write(file, "urgent\nbatch\nplain\n")
    assert [used("urgent", priority) for priority in (-1, -3)] == [-1, None], "it is read again"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("swordfish min_priority=high", "must be an integer in [-2147483648, 2147483647]"),
        ("swordfish min_priority=", "must be an integer"),
        ("swordfish min_priority=-2147483649", "got '-2147483649'"),
        ("swordfish min_priority=1 min_priority=2", "min_priority=, min_priority= after a key"),
        ("swordfish min_prioritty=1", "min_prioritty= after a key is not valid: the only setting"),
        ("swordfish tier=gold", "tier of a key must be one of interactive, flex; got 'gold'"),
        ("swordfish tier=", "tier of a key must be one of interactive, flex; got ''"),
        ("swordfish tier=flex,flex", "names a tier twice: 'flex,flex'"),
        ("swordfish tier=flex tier=flex", "tier=, tier= after a key is not valid"),
        ("swordfish tenant=a/b", "tenant of a key must have 1 to 64 of the characters"),
        ("swordfish tenant=" + "a" * 65, "tenant of a key must have 1 to 64 of the characters"),
        ("swordfish tighten=maybe", "tighten of a key must be yes or no, got 'maybe'"),
    ],
)
def test_wrong_settings_of_a_key_are_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        KeyRing((line,), tiers=("interactive", "flex"))
    assert "swordfish" not in str(caught.value)


def test_settings_of_a_key() -> None:
    line = "s3cret word tier=flex,interactive tenant=acme.eu tighten=no min_priority=-2"
    ring = KeyRing((line, "plain"), tiers=("interactive", "flex"))
    digest, plain = ring.find(b"s3cret word"), ring.find(b"plain")
    assert digest is not None and plain is not None
    assert ring.settings(digest) == KeySettings(
        min_priority=-2, tiers=("flex", "interactive"), tenant="acme.eu", may_tighten=False
    )
    assert ring.settings(plain) == KeySettings()
    with pytest.raises(ConfigError, match="must be left out: scheduler.tiers is empty"):
        KeyRing((line,), tiers=())


def test_a_changed_file_with_an_unknown_tier_changes_nothing(tmp_path: Path, eager: None) -> None:
    file = tmp_path / "keys"
    file.write_text("one tier=flex\n")
    ring = KeyRing((), str(file), tiers=("flex",))
    write(file, "one tier=gold\ntwo\n")
    digest = ring.find(b"one")
    assert digest is not None and ring.settings(digest).tiers == ("flex",)
    assert ring.find(b"two") is None


@pytest.mark.parametrize("key", ["a=b", "a b", "YWJj==", "min_priority=1"])
def test_keys_with_equals_signs_are_whole(key: str) -> None:
    assert KeyRing((key,)).find(key.encode()) is not None


def test_a_client_reads_the_servers_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team one\ns3cret word min_priority=-10  # urgent\nother\n")
    assert sent_key(f"@{file}") == "s3cret word"
