"""Service tiers in the configuration: their forms, the round trip, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_serve.config.keys import check_engine_config
from moe_serve.config.sections import EngineConfig, SchedulerConfig
from moe_serve.config.sources import LoadedConfig, load_config
from moe_serve.config.tiers import TierConfig, find_tier
from moe_serve.errors import ConfigError

VARIABLE = "MOE_SERVE_SCHEDULER_TIERS"
TIERS = (
    TierConfig(name="interactive", weight=4.0, ttft_s=1.0, tpot_s=0.1, max_output_tokens=100),
    TierConfig(name="flex", e2e_s=600.0, is_sheddable=True),
    TierConfig(name="0_-", predicted_output_limit=4.0, runaways="end"),
)
FILE = """\
scheduler:
  tiers:
    interactive: {weight: 4, ttft_s: 1.0, tpot_s: 0.1, max_output_tokens: 100}
    flex:
      e2e_s: 600
      sheddable: yes
    0_-: {predicted_output_limit: 4, runaways: end}
"""
JSON = """\
{"interactive": {"weight": 4, "ttft_s": 1, "tpot_s": 0.1, "max_output_tokens": 100},
 "flex": {"e2e_s": 600, "sheddable": true, "ttft_s": null},
 "0_-": {"predicted_output_limit": 4, "runaways": "end"}}"""


def load(tmp_path: Path, text: str = "", variable: str = "") -> LoadedConfig:
    file = tmp_path / "serve.yaml"
    file.write_text(text, "utf-8")
    return load_config(flags={}, environ={VARIABLE: variable}, file=file)


def test_yaml_json_and_the_printed_form_say_the_same(tmp_path: Path) -> None:
    """The order matters too: the first tier is the default one."""
    loaded = load(tmp_path, FILE)
    assert loaded.config.engine.scheduler.tiers == TIERS
    assert load(tmp_path, variable=JSON).config == loaded.config
    assert load(tmp_path, loaded.to_yaml()).config == loaded.config
    assert load(tmp_path, FILE, variable="{}").config.engine.scheduler.tiers == ()


def test_tiers_made_in_code_are_held_to_the_same_limits() -> None:
    config = EngineConfig(scheduler=SchedulerConfig(tiers=TIERS))
    assert check_engine_config(config) == config
    for tiers, message in [
        ((TierConfig(name="a", weight=0.0),), r"tiers\.a\.weight cannot be 0\.0 \(an argument\)"),
        ((TierConfig(name="a"), TierConfig(name="a")), "two tiers have the same name"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_engine_config(EngineConfig(scheduler=SchedulerConfig(tiers=tiers)))


def test_a_tier_is_found_by_its_name() -> None:
    assert find_tier(TIERS, "flex") is TIERS[1]
    assert find_tier(TIERS, "fle") is None


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ("[a]", r"tiers cannot be \['a'\] \(.*yaml:2\): it takes a mapping of at most 16"),
        ("null", r"tiers cannot be null \(.*:2\)"),
        ("3", r"tiers cannot be 3 \(.*:2\)"),
        ("{a: 3}", r"tiers\.a cannot be 3 \(.*:2\): it takes a mapping of weight, ttft_s"),
        ("{auto: {}}", r"'auto' is reserved \(.*:2\)"),
        ("{A: {}}", r"the name 'A' is not valid \(.*:2\).* a-z, 0-9, _ and -"),
        ("{'': {}}", "the name '' is not valid"),
        (f"{{{'a' * 33}: {{}}}}", "is not valid"),
        (f"{{{', '.join(f't{i}: {{}}' for i in range(17))}}}", r"has 17 tiers .* at most 16"),
        (
            "\n    a:\n      weigth: 1",
            r"unknown key scheduler\.tiers\.a\.weigth \(.*:4\): did.*weight",
        ),
        ("{a: {x: 1}}", r"tiers\.a\.x .* known are weight, ttft_s, tpot_s"),
        ("\n    a:\n      ttft_s: -1", r"a\.ttft_s cannot be -1 \(.*:4\): .* \[0\.001, 604800\]"),
        ("{a: {ttft_s: 1e9}}", r"ttft_s cannot be 1000000000\.0"),
        ("{a: {tpot_s: .inf}}", r"tpot_s cannot be inf"),
        ("{a: {e2e_s: .nan}}", r"e2e_s cannot be nan"),
        ("{a: {ttft_s: '1'}}", r"ttft_s cannot be '1'"),
        ("{a: {ttft_s: true}}", r"ttft_s cannot be True"),
        ("{a: {ttft_s: [1]}}", r"ttft_s cannot be \[1\]"),
        ("{a: {ttft_s: {b: {c: 1}}}}", r"ttft_s cannot be \{'b': \{'c': 1\}\}"),
        ("{a: {weight: null}}", r"weight cannot be None .* a number in \[0\.001, 1000\]\."),
        ("{a: {sheddable: 1}}", r"sheddable cannot be 1 .* true or false"),
        ("{a: {sheddable: maybe}}", r"sheddable cannot be 'maybe'"),
        ("{a: {max_output_tokens: 1.5}}", r"max_output_tokens cannot be 1\.5 .* an integer in \[1"),
        ("{a: {max_output_tokens: 0}}", r"max_output_tokens cannot be 0"),
        ("{a: {predicted_output_limit: 0.5}}", r"limit cannot be 0\.5 .* in \[1, 1000\], or null"),
        (
            "{a: {predicted_output_limit: 2, runaways: stop}}",
            r"runaways cannot be 'stop' \(.*:2\): it takes demote or end",
        ),
        ("{a: {runaways: [end]}}", r"runaways cannot be \['end'\]"),
        ("{a: {runaways: end}}", r"a has runaways end but no limit .*set predicted_output_limit"),
        ("{a: {ttft_s: 2, e2e_s: 1}}", r"tiers\.a has e2e_s 1 below its ttft_s 2 \(.*:2\)"),
        ("{a: {tpot_s: 2, e2e_s: 1}}", r"has e2e_s 1 below its tpot_s 2"),
        ("{a: {sheddable: true}}", r"is sheddable but has no target that could be missed"),
        ("{a: {sheddable: true, tpot_s: 1}}", r"is sheddable but has no target"),
        ("\n    a: {}\n    a: {}", r"scheduler\.tiers\.a is set twice \(.*:4\)"),
        ("{a: {weight: 1, weight: 2}}", r"scheduler\.tiers\.a\.weight is set twice \(.*:2\)"),
    ],
)
def test_wrong_tiers_are_refused(tmp_path: Path, tiers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, f"scheduler:\n  tiers: {tiers}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interactive", r"cannot be 'interactive' \(MOE_SERVE_SCHEDULER_TIERS\): it is not JSON"),
        ("{" * 5000, "it is not JSON"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "it is not JSON|tiers.a"),
        ('{"a": {"weight": NaN}}', r"weight cannot be nan \(MOE_SERVE_SCHEDULER_TIERS\)"),
        ('{"a": {}, "a": {}}', r"scheduler\.tiers\.a is set twice"),
        ('{"a": {"weight": 1, "weight": 2}}', r"scheduler\.tiers\.a\.weight is set twice"),
        ("null", r"tiers cannot be None"),
    ],
)
def test_a_wrong_variable_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, variable=text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("order: sjf", r"order cannot be 'sjf' .* one of auto, fifo, priority, edf, atc"),
        ("patience_s: 0", r"patience_s cannot be 0 .* \[0\.01, 3600\]"),
        ("max_wait_s: .nan", r"max_wait_s cannot be nan"),
        ("late: drop", r"late cannot be 'drop' .* keep, demote"),
        ("preempt: always", r"preempt cannot be 'always' .* memory, deadline"),
        ("step_budget: 3", r"step_budget cannot be 3 .* auto, fixed, slack"),
        ("min_prefill_tokens: 0", r"min_prefill_tokens cannot be 0 .* \[1, 1048576\]"),
    ],
)
def test_wrong_rules_are_refused(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, f"scheduler:\n  {line}\n")


def test_tiers_of_keys_must_exist(tmp_path: Path) -> None:
    tiers = "scheduler:\n  tiers: {a: {}, b: {}}\nserver:\n  key_tiers:"
    loaded = load(tmp_path, f"{tiers} [b, a]\n")
    assert loaded.config.server.key_tiers == ("b", "a")
    with pytest.raises(ConfigError, match=r"server\.key_tiers has 'c', .* \(a, b\): name one"):
        load(tmp_path, f"{tiers} [c]\n")
    with pytest.raises(ConfigError, match=r"not a tier of scheduler\.tiers \(empty\)"):
        load(tmp_path, "server:\n  key_tiers: [c]\n")
