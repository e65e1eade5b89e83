"""Templates render as in transformers, within limits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moe_serve.errors import CheckpointError, InvalidRequestError
from moe_serve.text.chat_template import ChatTemplate

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Grüße 🎉\n{{ 7 * 7 }}"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "last"},
]
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] "
        "+ '<|im_end|>\\n' }}{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "controls": (
        "{%- for m in messages %}\n  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "  {{- m | tojson }}{{ m.content | trim | upper }}\n"
        "  {% if loop.index > 2 %}{% break %}{% endif %}\n{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0, self=1) %}{% for m in messages[::-1] %}"
        "{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ bos_token }}{% endfor %}"
        "{{ dict(a=1) | tojson(indent=2) }}{% if tools %}tools{% endif %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("adds", [True, False])
def test_rendering_equals_transformers(name: str, adds: bool) -> None:
    rendered, _ = render_jinja_template(
        [CHAT], chat_template=TEMPLATES[name], add_generation_prompt=adds, bos_token="<s>"
    )
    template = ChatTemplate(TEMPLATES[name], special_tokens={"bos_token": "<s>"})
    assert template.render(CHAT, add_generation_prompt=adds) == rendered[0]


def test_strftime_now() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}")
    assert int(template.render(CHAT)) >= 2024


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"


@pytest.mark.parametrize(
    "part",
    [{"type": "image_url", "image_url": {"url": "http://x"}}, {"type": "text"}, "text", 7, None],
)
def test_other_parts_are_refused(part: object) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    content = [{"type": "text", "text": "a"}, part]
    with pytest.raises(InvalidRequestError, match="only text is served") as caught:
        template.render([{"role": "user", "content": content}])
    assert caught.value.param == "messages.0.content.1"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.nope.nope }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% set ns = namespace(_x=1) %}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError"),
        ("{% for i in range(9999) %}xxxxxxxxxxx{% endfor %}", "longer than 50000 characters"),
    ],
)
def test_a_failing_template_is_a_bad_request(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        ChatTemplate(source, max_chars=50_000).render(CHAT)


def test_a_slow_template_is_stopped() -> None:
    source = "{% for i in range(9999) %}{% for j in range(9999) %}{{ '' }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="took longer than 0.2 s"):
        ChatTemplate(source, max_seconds=0.2).render(CHAT)


def continued(template: ChatTemplate, chat: list[dict[str, Any]]) -> str:
    """Returns the prompt up to the end of the last message's content."""
    return asyncio.run(template.render_order(template.order(chat, continues=True)))


@pytest.mark.parametrize("content", ["I am", "<", "m", "im_end", "a ", "assistant", "user\n\n"])
def test_a_message_goes_on_where_its_content_ends(content: str) -> None:
    """The template may repeat the same text behind it, or trim it."""
    chat = [*CHAT, {"role": "assistant", "content": content}]
    before = "<|im_start|>user\nlast<|im_end|>\n<|im_start|>assistant\n"
    template = ChatTemplate(TEMPLATES["chatml"])
    assert continued(template, chat).endswith(before + content)
    trimming = ChatTemplate(TEMPLATES["chatml"].replace("m['content']", "(m['content'] | trim)"))
    assert continued(trimming, chat).endswith(before + content.strip())


def test_a_message_that_is_not_shown_cannot_go_on() -> None:
    for source in ("{{ messages[0].content }}", "{{ messages[-1].content | upper }}", "x"):
        with pytest.raises(InvalidRequestError, match="does not show the last message"):
            continued(ChatTemplate(source), CHAT)


def test_loading(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config = {
        "chat_template": [{"name": "default", "template": "A"}, {"name": "x", "template": ""}]
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(CHAT) == "A"
    (tmp_path / "chat_template.jinja").write_text("B")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(CHAT) == "B"
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not a valid Jinja"):
        ChatTemplate.load(tmp_path)
