"""The offline API: shapes of the results, text, stop strings, mistakes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moe_serve import LLM, SamplingParams
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.build import BuiltEngine
from moe_serve.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
)
from moe_serve.offline import llm as llm_module


@pytest.fixture(scope="module")
def llm(tiny: str) -> LLM:
    return LLM(tiny)


def test_prompts_as_text_or_ids(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    (text,) = llm.generate("abc", params, use_progress_bar=False)
    ids = llm.tokenizer.encode("abc")
    (by_ids,) = llm.generate(ids, params, use_progress_bar=False)
    both = llm.generate(["abc", ids], params, use_progress_bar=False)
    assert text.prompt == "abc" and by_ids.prompt is None
    assert text.prompt_token_ids == by_ids.prompt_token_ids == tuple(ids)
    answers = {o.outputs[0].token_ids for o in (text, by_ids, *both)}
    assert len(answers) == 1
    assert text.outputs[0].finish_reason == "length"
    assert text.outputs[0].text == llm.tokenizer.decode(text.outputs[0].token_ids)
    assert 0 < text.metrics.ttft_s <= text.metrics.e2e_s


def test_logprobs_and_prompt_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=2, prompt_logprobs=0)
    (result,) = llm.generate("abcd", params, use_progress_bar=False)
    (answer,) = result.outputs
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry[token].rank == 1 and len(entry) == 2
    assert answer.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(answer.token_ids, answer.logprobs, strict=True))
    )
    assert result.prompt_logprobs is not None
    assert [e is None for e in result.prompt_logprobs] == [True, False, False, False]


def test_logprobs_of_given_tokens(llm: LLM) -> None:
    common = {"max_tokens": 3, "temperature": 0, "n": 2}
    likeliest = SamplingParams(logprobs=20, **common)  # type: ignore[arg-type]
    (wide,) = llm.generate("abcd", likeliest, use_progress_bar=False)
    assert wide.outputs[0].logprobs is not None
    known = wide.outputs[0].logprobs[0]
    named = tuple([*known][5:8])
    given = SamplingParams(logprobs=0, logprob_token_ids=named, **common)  # type: ignore[arg-type]
    (result,) = llm.generate("abcd", given, use_progress_bar=False)
    for answer in result.outputs:
        assert answer.token_ids == wide.outputs[0].token_ids and answer.logprobs is not None
        first = answer.logprobs[0]
        assert [*first] == [answer.token_ids[0], *named]
        assert [entry.logprob for entry in first.values()] == [known[t].logprob for t in first]
        assert [entry.rank for entry in first.values()] == [1, None, None, None]


def test_a_stop_string_cuts_the_text_and_frees_the_request(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=1, ignore_eos=True)
    (whole,) = llm.generate("abc", params, use_progress_bar=False)
    text = whole.outputs[0].text
    stop = text[10:12]
    stopping = SamplingParams(max_tokens=60, temperature=1.0, seed=1, ignore_eos=True, stop=(stop,))
    (cut,) = llm.generate("abc", stopping, use_progress_bar=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert cut.outputs[0].finish_reason == "stop" and cut.outputs[0].stop_reason == stop
    stats = llm.stats()
    assert stats.load.num_free_pages == stats.load.num_pages


def test_one_params_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 5)]
    outputs = llm.generate(["a", "b"], params, use_progress_bar=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 5]
    with pytest.raises(InvalidRequestError, match="1 prompts came with 2"):
        llm.generate(["a"], params, use_progress_bar=False)


@pytest.mark.parametrize("field", ["adapter", "service_tier"])
def test_names_of_a_wrong_type_are_refused(llm: LLM, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} cannot be 3: give one name"):
        llm.generate(["a"], use_progress_bar=False, **{field: 3})  # type: ignore[arg-type]


def test_adapters_are_a_mapping(tiny: str) -> None:
    with pytest.raises(ConfigError, match="adapters cannot be .* give {name: folder}"):
        LLM(tiny, adapters=["sql"])  # type: ignore[arg-type]


def test_prompts_of_an_urgent_tier_go_first(llm: LLM, tiny: str) -> None:
    """With one seat, the tiers give the order; the tokens are those of an LLM without tiers."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompts = ["abc", "bcd", "cde"]
    plain = llm.generate(prompts, params, use_progress_bar=False)
    tiers = {"flex": {"e2e_s": 600, "max_output_tokens": 4}, "chat": {"weight": 9, "ttft_s": 0.5}}
    with LLM(tiny, tiers=tiers, max_num_seqs=1) as tiered:
        found = tiered.generate(
            prompts, params, service_tier=["", "flex", "chat"], use_progress_bar=False
        )
        counts = tiered.stats().service
        for wrong, words in (
            ("gold", "the tiers are flex, chat"),
            (["chat"], "3 prompts .* 1 name"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                tiered.generate(prompts, params, service_tier=wrong, use_progress_bar=False)
    lengths = [len(output.outputs[0].token_ids) for output in found]
    assert lengths == [4, 4, 6], "flex, the first tier, has a limit"
    for output, same in zip(found, plain, strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == same.outputs[0].token_ids[: len(tokens)]
    assert counts is not None
    assert {each.tier: each.num_finished for each in counts.tiers} == {"flex": 2, "chat": 1}
    first = [output.metrics.ttft_s for output in found]
    assert first[2] < first[1], "chat came last and began before the second of flex"


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate("a", SamplingParams(max_tokens=2))
    assert "Generating" in capsys.readouterr().out


def test_mistakes_are_told_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="The prompt is empty"):
        llm.generate([[]], use_progress_bar=False)
    with pytest.raises(InvalidRequestError, match=r"Token id 300 is outside .* \[0, 299\]"):
        llm.generate([[300]], use_progress_bar=False)
    with pytest.raises(ContextLengthError, match="500 tokens and max_tokens is 16: 516 together"):
        llm.generate([[1] * 500], use_progress_bar=False)
    for wrong in ([[1.5]], [None], 5, [[1, "a"]]):
        with pytest.raises(InvalidRequestError):
            llm.generate(wrong, use_progress_bar=False)  # type: ignore[arg-type]
    steps = llm.stats().num_steps
    with pytest.raises(InvalidRequestError):
        llm.generate(["fine", [300]], use_progress_bar=False)
    with pytest.raises(InvalidRequestError, match="the tiers are none: give LLM its tiers"):
        llm.generate("fine", service_tier="chat", use_progress_bar=False)
    with pytest.raises(InvalidRequestError, match="cache_salt must be a string, got None"):
        llm.generate("fine", cache_salt=None, use_progress_bar=False)  # type: ignore[arg-type]
    assert llm.stats().num_steps == steps


def test_a_closed_llm_says_so(tiny: str) -> None:
    with LLM(tiny) as llm:
        pass
    with pytest.raises(EngineDeadError, match="this LLM was closed"):
        llm.generate("a")
    with pytest.raises(EngineDeadError, match="this LLM was closed"):
        llm.stats()


def test_wrong_settings(tiny: str) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        LLM("/nowhere/at/all")
    with pytest.raises(ConfigError, match=r"max_model_len \(513\) must be in \[2, 512\]"):
        LLM(tiny, max_model_len=513)
    with pytest.raises(ConfigError, match="2 pages"):
        LLM(tiny, num_pages=2)
    with pytest.raises(
        ConfigError, match=r"unknown key tiers\.a\.tft_s \(LLM\): did you mean ttft_s"
    ):
        LLM(tiny, tiers={"a": {"tft_s": 1}})


def test_without_a_tokenizer_no_rank_is_started(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gets no LLM to close, so its ranks would run as long as the process."""
    shutil.copy(Path(tiny) / "config.json", tmp_path)

    def build(_: EngineConfig) -> BuiltEngine:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(llm_module, "build_any_engine", build)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        LLM(str(tmp_path), attention_ranks=1, expert_ranks=1)
