"""The scripts that make the demonstration model and random checkpoints, without training."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2.sandbox
import pytest
import torch
from safetensors.torch import load_file

from demo_model.corpus import chats_of, render_chat
from demo_model.evaluation import ExpertUse, trigram_bits_per_byte, window_spans
from demo_model.export import (
    CHAT_TEMPLATE,
    from_hf,
    hf_names,
    model_card,
    model_config,
    num_parameters,
    to_hf,
)
from demo_model.network import Network, Shape
from demo_model.plots import TrainingLog
from make_random_model import (
    FAMILIES,
    Sizes,
    TensorSpec,
    split_into_shards,
    tensor_specs,
    write_random_model,
)

TINY = Shape(
    vocab_size=64, width=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    num_experts=4, top_k=2, expert_width=16, max_positions=64,
)  # fmt: skip


class TestChatsOf:
    def test_instruction_and_response(self) -> None:
        text = "Preamble.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3\n"
        assert chats_of(text) == [[("Add.\n\n1 2", "3")]]

    def test_question_and_answer(self) -> None:
        assert chats_of("Question: How many?\nAnswer: Two.\nThat is all.\n") == [
            [("How many?", "Two.\nThat is all.")]
        ]

    def test_drills_make_conversations_of_up_to_three_turns(self) -> None:
        text = "\n\n".join(f"Q: {i} + 1?\nA: {i + 1}" for i in range(4))
        first, second = chats_of(text)
        assert first == [("0 + 1?", "1"), ("1 + 1?", "2"), ("2 + 1?", "3")]
        assert second == [("3 + 1?", "4")]

    def test_prose_holds_no_chat(self) -> None:
        assert chats_of("Call me Ishmael.") == []


class TestChatTemplate:
    @staticmethod
    def render(messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        )
        return environment.from_string(CHAT_TEMPLATE).render(
            messages=messages, add_generation_prompt=add_generation_prompt
        )

    def test_equals_the_form_of_the_training_text(self) -> None:
        turns = [("  Hi,\n\nyou ", "Hello\n"), ("{{ 1 }}?", "<b>'no'</b>")]
        messages = [
            {"role": role, "content": content}
            for turn in turns
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        assert self.render(messages) == render_chat(turns)

    def test_generation_prompt_continues_as_a_trained_answer_begins(self) -> None:
        prompt = self.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        assert render_chat([("Hi", "Hello")]) == f"{prompt}Hello<|im_end|>\n"

    def test_system_message(self) -> None:
        text = self.render([{"role": "system", "content": "Be brief."}])
        assert text == "<|im_start|>system\nBe brief.<|im_end|>\n"


class TestHfNames:
    def test_one_name_or_one_per_expert(self) -> None:
        assert hf_names("embedding", 2) == ["model.embed_tokens.weight"]
        assert hf_names("layers.3.moe.router", 2) == ["model.layers.3.mlp.gate.weight"]
        assert hf_names("layers.0.moe.down", 2) == [
            "model.layers.0.mlp.experts.0.down_proj.weight",
            "model.layers.0.mlp.experts.1.down_proj.weight",
        ]

    def test_there_and_back_keeps_every_bf16_value(self) -> None:
        weights = {k: v.bfloat16().float() for k, v in Network(TINY).state_dict().items()}
        tensors = to_hf(weights, TINY.num_experts)
        assert "lm_head.weight" not in tensors, "the head is tied"
        back = from_hf(tensors, list(weights), TINY.num_experts)
        for name, weight in weights.items():
            assert torch.equal(back[name], weight), name

    def test_parameter_count_of_the_card(self) -> None:
        total, active = num_parameters(TINY)
        assert total == sum(p.numel() for p in Network(TINY).parameters())
        assert active < total


def test_model_card_names_sources_and_the_caveat() -> None:
    card = model_card(Shape(), num_steps=100, train_seconds=60)
    for source in ("teknium1/GPTeacher", "openstax/osbooks-astronomy", "bundestag/gesetze"):
        assert source in card, source
    assert "written by another language\nmodel" in card


def test_config_states_the_rotary_base_for_old_and_new_readers() -> None:
    config = model_config(Shape(), 0.05)
    assert config["rope_theta"] == 10_000.0
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}


def test_trigram_learns_a_fixed_cycle_and_pays_eight_bits_for_the_unseen() -> None:
    assert trigram_bits_per_byte(["abc" * 500], ["abc" * 100]) < 0.1
    assert trigram_bits_per_byte(["abc" * 500], ["\x01\x02\x03" * 100]) > 7.0


def test_evaluation_windows_cover_everything_once() -> None:
    assert window_spans(10, 3, 2) == [(0, 6), (6, 9), (9, 10)]
    assert window_spans(6, 3, 2) == [(0, 6)]
    assert window_spans(2, 3, 2) == [(0, 2)]


def test_expert_use_of_disjoint_and_of_equal_domains() -> None:
    """Two domains, four experts: layer 0 separates the domains, layer 1 does not and never uses
    expert 3."""
    choices = {
        "a": torch.tensor([[5, 5, 0, 0], [1, 1, 2, 0]]),
        "b": torch.tensor([[0, 0, 8, 8], [2, 2, 4, 0]]),
    }
    split, alike = ExpertUse.of(choices, top=2).layers()
    assert (split.information_bits, split.distance, split.top_share) == pytest.approx((1, 1, 1))
    assert split.num_dead == 0
    assert (alike.information_bits, alike.distance) == pytest.approx((0, 0))
    assert (alike.num_dead, alike.num_nearly_dead, alike.least_used) == (1, 1, 0)


def test_training_log_keeps_the_last_word_of_a_repeated_step(tmp_path: Path) -> None:
    lines = [
        {"step": 10, "loss": 9.0},
        {"step": 19, "valid": {"a": 3.0, "b": 5.0}},
        {"step": 20, "loss": 4.0},
        {"step": 10, "loss": 8.0},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    log = TrainingLog.read(path)
    assert log.losses() == ([10, 20], [8.0, 4.0])
    assert log.mean_valid(last=3) == [(19, 4.0)]


class TestRandomModel:
    SIZES = Sizes(
        num_layers=2, width=32, num_heads=2, num_kv_heads=1, head_dim=16,
        num_experts=4, top_k=2, expert_width=24, vocab_size=64,
    )  # fmt: skip

    @pytest.mark.parametrize("family", sorted(FAMILIES))
    def test_index_names_every_tensor_and_the_seed_fixes_them(
        self, family: str, tmp_path: Path
    ) -> None:
        counts = [
            write_random_model(
                tmp_path / name, family, self.SIZES, dtype="float32", seed=3, shard_bytes=20_000
            )
            for name in ("one", "two")
        ]
        index = json.loads((tmp_path / "one" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 4 * counts[0]
        files = sorted(set(index["weight_map"].values()))
        assert len(files) > 1, "the sizes of this test should need several shards"
        for file in files:
            one, two = (load_file(tmp_path / name / file) for name in ("one", "two"))
            assert set(one) == {k for k, v in index["weight_map"].items() if v == file}
            assert all(torch.equal(one[name], two[name]) for name in one)

    def test_default_size(self) -> None:
        num = sum(torch.Size(s.shape).numel() for s in tensor_specs("qwen3_moe", Sizes()))
        assert 1.25e9 < num < 1.27e9

    def test_olmoe_refuses_a_head_width_that_it_cannot_have(self) -> None:
        with pytest.raises(ValueError, match=r"width / num_heads \(32 / 2\), got 8"):
            FAMILIES["olmoe"].check(Sizes(width=32, num_heads=2, head_dim=8))

    def test_shards_keep_order_and_give_a_huge_tensor_its_own(self) -> None:
        specs = [
            TensorSpec(name, (size,), None)
            for name, size in zip("abcd", (4, 5, 30, 1), strict=True)
        ]
        names = [[spec.name for spec in shard] for shard in split_into_shards(specs, 10)]
        assert names == [["a", "b"], ["c"], ["d"]]
