"""A template stays within its time and memory or is stopped, and the next chat is rendered."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moe_serve.errors import CheckpointError, InvalidRequestError, ServerOverloadedError
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.template_limits import DEADLINE
from moe_serve.text.template_renderer import QUICK, SLOW
from moe_serve.text.template_worker import chat_environment

MIB = 1024 * 1024
MANY = "((range(100000) | list) * 80)"
HOSTILE = {
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 10000}) }}",
    "tojson indent": "{{ (range(90000) | list) | tojson(indent=99999) }}",
    "tojson of a graph": "{% set ns = namespace(x=[1]) %}{% for i in range(500) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "% with a tuple": "{{ ('%99999d' * 9000) % ((1,) * 9000) }}",
    "format": "{{ ('{:99999}' * 9000).format(*range(9000)) }}",
    "format of one text": "{{ ('{0}' * 100000).format('x' * 8000000) }}",
    "format filter": "{{ ('%s' * 4000) | format(*(('x' * 8000000,) * 4000)) }}",
    "map and join": "{{ " + MANY + " | map('string') | map('upper') | join | length }}",
    "map to wide texts": "{{ range(100000) | map('string') | map('center', 99999) | join }}",
    "sort": "{{ " + MANY + " | map('string') | sort | length }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "repetition": "{{ 'x' * 10**9 }}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "ranges": "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}"
    "{% set ns.x = ns.x + [range(100000) | list] %}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(99) }}",
    "endless macro": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "namespace": "{% set ns = namespace(x=[]) %}{% for a in range(9999) %}"
    "{% set ns.x = [ns.x, 'y' * 8000000 ~ a] %}{% endfor %}",
    "doubling": "{% set ns = namespace(x='x') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "slices": "{% set ns = namespace(x='y' * 8000000, n=0) %}{% for i in range(99999) %}"
    "{% set ns.n = ns.n + (ns.x[::-1] | length) %}{% endfor %}",
    "center": "{% for i in range(99999) %}{% set x = 'x' | center(99999) %}{{ x }}{% endfor %}",
    "indent": "{{ ('\\n' * 8000000) | indent(99999) }}",
    "wordwrap": "{{ ('a b ' * 2000000) | wordwrap(1) | length }}",
    "slice filter": "{{ range(100000) | slice(99999, 'x') | map('list') | map('length') | sum }}",
    "unique and groupby": "{{ " + MANY + " | unique | groupby('real') | list | length }}",
    "sum of lists": "{{ ([[0] * 1000] * 100000) | sum(start=[]) | length }}",
    "urlize": "{{ ('http://a.b ' * 700000) | urlize | length }}",
    "expandtabs": "{{ ('\\t' * 8000000).expandtabs(99999) }}",
    "codecs": "{{ ('e' * 8000000).encode('utf-32').hex().encode('utf-32').hex() | length }}",
    "cycler": "{% set c = cycler(*range(99999)) %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{{ c.next() }}{% endfor %}{% endfor %}",
}
BRANCHES = "".join(
    "{% if messages[0].content == '" + name + "' %}" + source + "{% endif %}"
    for name, source in HOSTILE.items()
)
ENDLESS = "{% if messages[0].content == 'go' %}{{ lipsum(n=10**8) }}{% endif %}fine"


def chat(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def worker_ids(of: int | None = None) -> list[int]:
    """Returns the processes that render chats for a process (by default this one), without their
    children."""
    found = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/stat") as stat, open(f"/proc/{name}/cmdline") as command:
                parent = int(stat.read().rsplit(")", 1)[1].split()[1])
                if parent == (of or os.getpid()) and "template_worker" in command.read():
                    found.append(int(name))
        except (OSError, ValueError):
            continue
    return found


@pytest.fixture(scope="module")
def template() -> Iterator[ChatTemplate]:
    """All hostile sources in one template, with low limits."""
    made = ChatTemplate(BRANCHES + "fine", max_seconds=0.1, max_bytes=48 * MIB)
    yield made
    made.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_expression_is_ended(template: ChatTemplate, name: str) -> None:
    """In the server's process, these took gigabytes or ran for 25 s and more."""
    with pytest.raises(InvalidRequestError) as caught:
        template.render(chat(name))
    assert caught.value.param == "messages"
    words = ("took longer than 0.1 s", "more than 48 MiB", "failed on", "longer than 8388608")
    assert any(word in str(caught.value) for word in words), str(caught.value)
    assert template.render(chat("hello")) == "fine"


def test_all_processes_together_stay_small() -> None:
    """A template that takes all it can stays below 512 MiB."""
    an_empty_process = 25 * MIB
    total = 0
    for lane in (QUICK, SLOW):
        total += lane.num_workers * (2 * an_empty_process + lane.max_bytes)
    assert total < 512 * MIB
    assert QUICK.max_seconds + SLOW.max_seconds <= 1.0  # twice: an answer comes within 2 s


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
def test_the_system_holds_the_limits() -> None:
    template = ChatTemplate("{{ 1 }}", max_bytes=48 * MIB).check()
    template.render(chat("x"))
    ids = worker_ids()
    assert ids
    limits = [resource.prlimit(each, resource.RLIMIT_AS)[1] for each in ids]
    assert any(0 < limit < 1024 * MIB for limit in limits), limits
    template.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_closing_and_forgetting_end_the_processes() -> None:
    for forget in (False, True):
        before = set(worker_ids())
        template = ChatTemplate("{{ 1 }}").check()
        assert set(worker_ids()) - before
        if not forget:
            template.close()
        del template
        assert set(worker_ids()) <= before


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_worker_that_is_killed_is_replaced() -> None:
    before = set(worker_ids())
    template = ChatTemplate(ENDLESS, max_seconds=30.0).check()
    assert template.render(chat("x")) == "fine"
    for number in set(worker_ids()) - before:
        os.killpg(number, signal.SIGKILL)
    time.sleep(0.1)
    assert template.render(chat("x")) == "fine"
    template.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_end_with_a_server_that_is_killed() -> None:
    code = (
        "import sys; from moe_serve.text.chat_template import ChatTemplate\n"
        "t = ChatTemplate('{{ messages[0].content }}').check()\n"
        "print(t.render([{'role': 'user', 'content': 'up'}]), flush=True)\n"
        "sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as server:
        assert server.stdout is not None and server.stdout.readline() == b"up\n"
        ids = worker_ids(server.pid)
        assert ids
        server.kill()
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{number}") for number in ids):
        assert time.monotonic() < deadline, "a worker outlives its server"
        time.sleep(0.05)


def test_others_are_rendered_while_a_chat_runs_away() -> None:
    """Other chats wait at most the quick lane's 0.2 s, not until the hostile chat ends."""
    template = ChatTemplate(ENDLESS, max_seconds=20.0).check()
    (slow,) = template._renderer._slow._idle
    ended = threading.Event()

    def run_away() -> None:
        with pytest.raises(InvalidRequestError, match="longer than 20 s|MiB of memory"):
            template.render(chat("go"))
        ended.set()

    thread = threading.Thread(target=run_away)
    thread.start()
    for _ in range(50):
        assert template.render(chat("x")) == "fine"
    assert not ended.is_set()
    deadline = time.monotonic() + 60
    while slow.readiness < 2:  # it has come to the slow lane
        assert time.monotonic() < deadline, "it does not leave the quick lane"
        time.sleep(0.01)
    assert slow._process is not None
    os.killpg(slow._process.pid, signal.SIGKILL)  # do not wait for it
    thread.join(60)
    assert ended.is_set()
    template.close()


def test_slow_chats_do_not_queue_behind_each_other() -> None:
    template = ChatTemplate(ENDLESS, max_seconds=3.0).check()

    async def all_at_once() -> list[str | BaseException]:
        orders = [template.order(chat(content)) for content in ("go", "go", "go", "x")]
        work = [template.render_order(order) for order in orders]
        return await asyncio.gather(*work, return_exceptions=True)

    *slow, fine = asyncio.run(all_at_once())
    template.close()
    assert fine == "fine"
    kinds = [type(each) for each in slow]
    assert kinds.count(InvalidRequestError) == 1, slow
    assert kinds.count(ServerOverloadedError) == 2, slow


def test_a_client_that_leaves_gives_its_place_back() -> None:
    template = ChatTemplate(ENDLESS, max_seconds=0.3).check()

    async def leave() -> str:
        tasks = [asyncio.ensure_future(template.render_order(template.order(chat("go"))))] * 3
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await template.render_order(template.order(chat("x")))

    assert asyncio.run(leave()) == "fine"
    template.close()


def test_every_value_arrives_as_it_is() -> None:
    """The text equals that of this process, even for values that JSON lacks."""
    source = (
        "{% for m in messages %}{{ m }}|{{ m.content | length }}|{{ m | tojson(indent=1) }}"
        "{% endfor %}{{ tools | tojson }}{{ x }}{{ y * 2 }}{{ z }}{{ bos_token }}{{ nothing }}"
    )
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Grüße \U0001f389 \ud800 \x00\u2028<b>&'\""},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 10**40, "b": [1.5e300]}}}],
        },
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"é": None}}}]
    options = {"x": float("nan"), "y": float("-inf"), "z": True}
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    plain = chat_environment().from_string(source)
    context = {**options, "bos_token": "<s>", "messages": messages, "tools": tools}
    DEADLINE.set(math.inf)
    assert template.render(messages, tools=tools, options=options) == plain.render(context)
    template.close()


def test_what_json_cannot_hold_is_refused() -> None:
    template = ChatTemplate("x")
    with pytest.raises(InvalidRequestError, match="cannot be written as JSON"):
        template.render([{"role": "user", "content": "x", "more": {1, 2}}])


def test_a_template_that_cannot_be_compiled() -> None:
    for source in ("{% for %}", "{{ x | no_such_filter }}", "{{ " + "(" * 5000 + "}}"):
        with pytest.raises(CheckpointError, match="is not a valid Jinja template"):
            ChatTemplate(source).check()
    with pytest.raises(CheckpointError, match="at most 1048576 are allowed"):
        ChatTemplate("x" * (MIB + 1))
