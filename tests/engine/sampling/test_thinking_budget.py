"""Thinking budgets on the demonstration model: the same tokens in every batch, with a marker of
several tokens, after a preemption, and in harmony's channels."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from moe_serve import LLM, CompletionOutput, Constraint, SamplingParams
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.answer_masks import AnswerMasks
from moe_serve.engine.sampling.grammar.grammars import Grammars
from moe_serve.engine.sampling.grammar.vocabulary import vocabulary_of
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.sampling.thinking_limit import limiting_markers
from moe_serve.errors import InvalidRequestError
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.assistant.format_grammars import Spelling, harmony_lead, thinking_lead
from moe_serve.text.assistant.formats import REASONING_FORMATS, ReasoningFormat
from moe_serve.text.assistant.harmony_format import MARKERS, HarmonyParser
from moe_serve.text.assistant.outbox import Outbox, joined
from moe_serve.text.tokenizer import Tokenizer
from tests.support.engine.points import ends_of

PROMPT = "Once upon a time"
THINK = ReasoningFormat()  # five tokens close it here, and four open it
LEAD = thinking_lead("<think>", "</think>", Spelling({}), is_open=True, has_layout=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as opened:
        yield opened


def limited(llm: LLM, budget: int, prompt: str = "<think>\n", **params: Any) -> SamplingParams:
    fields = {"max_tokens": 24, "seed": 5, "ignore_eos": True} | params
    wanted = SamplingParams(thinking_token_budget=budget, **fields)
    markers = limiting_markers(wanted, wanted.constraint, THINK, prompt, llm.tokenizer)
    return replace(wanted, thinking_markers=markers)


def answers(llm: LLM, params: list[SamplingParams]) -> list[CompletionOutput]:
    results = llm.generate([PROMPT] * len(params), params, use_progress_bar=False)
    return [output for result in results for output in result.outputs]


@pytest.mark.parametrize("temperature", [0, 1])
def test_every_batch_has_the_same(llm: LLM, temperature: int) -> None:
    close = llm.tokenizer.encode("</think>", add_special_tokens=False)
    assert len(close) == 5
    free = SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
    wanted = [free, *(limited(llm, n, temperature=temperature, logprobs=1) for n in (0, 1, 9))]
    together = answers(llm, wanted)
    assert [answer.token_ids for answer in together] == [
        answers(llm, [params])[0].token_ids for params in wanted
    ]
    plain, *rest = (list(answer.token_ids) for answer in together)
    for budget, ids in zip((0, 1, 9), rest, strict=True):
        assert ids[: budget + 5] == plain[:budget] + close and len(ids) == 24


def test_choices_count_for_themselves(llm: LLM) -> None:
    found = answers(llm, [limited(llm, 6, n=3, temperature=1.5)])
    texts = [answer.text.split("</think>") for answer in found]
    assert {len(parts) for parts in texts} == {2}
    assert len({thought for thought, _ in texts}) == len({rest for _, rest in texts}) == 3


def test_reasoning_that_the_answer_opens(llm: LLM) -> None:
    """Both markers are text that a grammar writes; the second one is not at the beginning."""
    of = {"prompt": "assistant:", "ignore_eos": False, "temperature": 0.0}
    opened = Constraint("regex", "\n<think>[a-c]{1,30}</think>[0-9]{3}<think>[0-9]{9}")
    wanted = [limited(llm, n, constraint=opened, max_tokens=60, **of) for n in (3, 50)]
    short, long = answers(llm, wanted)
    for answer, num_letters in ((short, range(3, 9)), (long, range(20, 31))):
        thought, rest = answer.text.removeprefix("\n<think>").split("</think>")
        assert len(thought) in num_letters and rest[3:10] == "<think>" and len(rest) == 19


def test_a_schema_follows(llm: LLM) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}},
                         "required": ["a"], "additionalProperties": False})  # fmt: skip
    constraint = Constraint("json_schema", schema, LEAD)
    wanted = [limited(llm, n, constraint=constraint, max_tokens=99, n=2) for n in (0, 7)]
    for answer in answers(llm, wanted):
        assert isinstance(json.loads(answer.text.split("</think>")[1])["a"], bool)
        assert answer.finish_reason == "stop"


def test_a_preemption_keeps_the_count() -> None:
    """Six answers of 50 tokens share pages for three of them."""
    with LLM(num_pages=12, max_model_len=192, prefix_cache=False) as small:
        wanted = [limited(small, 32 + i, max_tokens=50, temperature=1) for i in range(6)]
        found = [answer.token_ids for answer in answers(small, wanted)]
        assert small.stats().counts.num_preemptions > 0
    with LLM(max_model_len=192) as large:
        assert found == [answer.token_ids for answer in answers(large, wanted)]
        texts = [large.tokenizer.decode(ids) for ids in found]
    assert all(text.count("</think>") == 1 for text in texts)


def test_without_markers_it_is_refused(llm: LLM) -> None:
    params = SamplingParams(thinking_token_budget=5)
    with pytest.raises(InvalidRequestError, match="needs a model that marks its reasoning") as info:
        llm.generate(PROMPT, params, use_progress_bar=False)
    assert info.value.param == "thinking_token_budget"
    none = replace(params, thinking_token_budget=-1)
    assert llm.generate(PROMPT, none, use_progress_bar=False)[0].outputs[0].text


def test_the_markers_of_the_chat_template(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(demo_model_folder(), folder, ignore=shutil.ignore_patterns("predictor"))
    template = "{{ messages[0].content }}<think>\n{# </think> #}"
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    params = SamplingParams(thinking_token_budget=4, max_tokens=20, temperature=0.0)
    with LLM(str(folder)) as opened:
        close = opened.tokenizer.encode("</think>", add_special_tokens=False)
        (chat,) = opened.chat([{"role": "user", "content": PROMPT}], params).outputs
        ids = opened.tokenizer.encode(PROMPT + "<think>\n")
        (text,) = opened.generate([ids], params, use_progress_bar=False)[0].outputs
    assert list(chat.token_ids[4:9]) == close == list(text.token_ids[4:9])


def harmony_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(MARKERS))
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("can_call", "following"),
    [(False, "<|start|>assistant<|channel|>final<|message|>"), (True, "<|start|>assistant")],
)
def test_the_end_of_harmonys_analysis(can_call: bool, following: str) -> None:
    tokenizer, params = harmony_tokenizer(), SamplingParams(thinking_token_budget=2)
    harmony = REASONING_FORMATS["gpt-oss"]
    of = limiting_markers(params, None, harmony, "<|start|>assistant", tokenizer, can_call=can_call)
    assert of is not None and of.can_reopen and not of.is_open
    decoded = [tokenizer.decode(ids, skip_special_tokens=False) for ids in (of.end, *of.openings)]
    assert decoded == ["<|end|>" + following, "<|channel|>analysis<|message|>"]
    assert {tokenizer.decode(ids, skip_special_tokens=False) for ids in of.closings} == {
        "<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>"
    }  # fmt: skip


@pytest.mark.parametrize("has_grammar", [False, True])
def test_harmony_goes_on_to_the_final_channel(has_grammar: bool) -> None:
    """Any allowed byte may be drawn; the parser reads the result."""
    tokenizer = harmony_tokenizer()
    size, eos = tokenizer.vocab_size, frozenset({tokenizer.special_ids["<|return|>"]})
    masks = AnswerMasks(size, eos, Grammars(lambda: vocabulary_of(tokenizer, size, eos)))
    lead = harmony_lead(Spelling(tokenizer.special_ids), has_analysis=True, is_final=True)
    constraint = Constraint("regex", "[0-9]{4}", lead) if has_grammar else None
    wanted = SamplingParams(
        thinking_token_budget=6, constraint=constraint, temperature=1, seed=3, max_tokens=None
    )
    markers = limiting_markers(wanted, constraint, REASONING_FORMATS["gpt-oss"], "", tokenizer)
    params = replace(wanted, thinking_markers=markers)
    request = GenerationRequest(request_id="r", prompt_token_ids=(1,), params=params)
    sequence, sampler = Sequence(0, request), Sampler(eos)
    answer = tokenizer.encode("<|channel|>analysis<|message|>", add_special_tokens=False)
    for token in answer:
        sequence.append(token)
    logits = torch.zeros(1, size)
    logits[0, list(tokenizer.special_ids.values())] = -50.0
    while sequence.num_tokens < 40 and sequence.token_ids[-1] not in eos:
        masked = masks.of(ends_of([sequence]))
        assert not masked.failures
        sequence.append(sampler.sample(logits, ends_of([sequence]), masked.masks)[0].token_id)
    text = tokenizer.decode(sequence.token_ids[1:], skip_special_tokens=False)
    parser = HarmonyParser(Outbox(), has_tools=False, has_reasoning=True)
    found = joined(parser.push(text), parser.finish())
    assert found.reasoning and len(tokenizer.encode(found.reasoning)) <= 9
    assert "<|end|><|start|>assistant<|channel|>final<|message|>" in text
    assert re.fullmatch("[0-9]{4}", found.content) if has_grammar else found.content


def test_a_grammar_without_reasoning_has_no_budget() -> None:
    tokenizer = harmony_tokenizer()
    for constraint, is_limited in (
        (Constraint("json_object"), False),
        (Constraint("json_object", "", LEAD), True),
        (Constraint("regex", "[a-z]+"), False),
        (Constraint("regex", "[a-z]+</think>[0-9]"), True),
        (Constraint("json_schema", '{"const": "</think>"}'), False),
    ):
        params = SamplingParams(thinking_token_budget=2, constraint=constraint)
        found = limiting_markers(params, constraint, THINK, "<think>", tokenizer)
        assert (found is not None) is is_limited, constraint
