"""The scripts that train and judge a drafting head; tiny sizes, no corpus."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_serve.learn.documents import Document, TextPiece, cut_into_pieces
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.tokenizer import Tokenizer
from speculation_head.acceptance import MOST, Asked, Sizes, accepted, ask, by_label
from speculation_head.card import write_card
from speculation_head.export import MAX_BUNDLED_BYTES, export_weights
from speculation_head.figures import head_drafts, judge
from speculation_head.network import DraftingHead, HeadShape
from speculation_head.ngram_table import NgramTable
from speculation_head.shards import Recipe, Shard, make_shards, natural_length, shard_paths
from speculation_head.target import Rows, TargetModel
from speculation_head.training import Positions, Schedule, Training

TEXTS = {
    "stories": "It was a dark and stormy night, and the old captain sat by the fire.",
    "code": "def read_lines(path):\n    with open(path) as file:\n        return list(file)\n",
    "law": "§ 12\nDie zuständige Behörde kann auf Antrag Ausnahmen zulassen, wenn die Sicherheit",
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(None, 1)


@pytest.fixture(scope="module")
def pieces(target: TargetModel) -> list[TextPiece]:
    documents = [Document(text * 3, label) for label, text in TEXTS.items()]
    return cut_into_pieces(documents, Tokenizer.load(target.folder), 10**6, 10**6, 0)


class TestNaturalLength:
    @pytest.mark.parametrize("period", [1, 3, 32])
    def test_a_loop_is_cut_behind_its_first_turn(self, period: int) -> None:
        loop = np.tile(np.arange(period) + 500, 70)[:80]
        tokens = np.concatenate((np.arange(40), loop))
        assert natural_length(tokens) == 40 + period

    def test_a_short_or_slow_loop_stays(self) -> None:
        assert natural_length(np.tile(np.arange(2), 31)) == 62
        assert natural_length(np.tile(np.arange(33), 5)) == 165

    def test_a_loop_that_is_left_stays(self) -> None:
        tokens = np.append(np.zeros(100, dtype=np.int64), 7)
        assert natural_length(tokens) == 101


class TestNgramTable:
    TABLE = NgramTable([np.array([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 5]), np.array([9, 3, 6])], 10)

    def test_the_longest_context_decides(self) -> None:
        assert self.TABLE(np.array([[1, 2, 3]])).tolist() == [5]
        assert self.TABLE(np.array([[0, 9, 3]])).tolist() == [6]

    def test_backs_off_and_knows_what_it_does_not_know(self) -> None:
        assert self.TABLE(np.array([[7, 7, 2], [7, 7, 0]])).tolist() == [3, -1]

    def test_grams_end_with_their_text(self) -> None:
        assert self.TABLE(np.array([[2, 3, 5]])).tolist() == [1], "not 9, the next text"

    def test_a_large_vocabulary_has_no_4_grams(self) -> None:
        table = NgramTable([np.array([1, 2, 3, 4, 9, 2, 3, 5, 7, 2, 3, 5])], 150_000)
        assert table(np.array([[1, 2, 3]])).tolist() == [5], "what most often followed 2, 3"

    def test_chains_feed_their_guesses(self) -> None:
        assert self.TABLE.chains(np.array([[5, 1, 2]]), 4).tolist() == [[3, 5, 1, 2]]


def test_acceptance_counts_positions_in_turn() -> None:
    truth = torch.tensor([[1, 2, 3, 4], [1, 2, 3, -1], [1, 2, -1, -1]])
    asked = Asked(
        hidden_ND=torch.zeros(3, 2),
        last_N3=torch.zeros(3, 3, dtype=torch.int64),
        truth_NM=truth,
        label_N=torch.tensor([0, 0, 1]),
        is_looped_N=torch.zeros(3, dtype=torch.bool),
        labels=("a", "b"),
    )
    drafts = np.array([[1, 2, 9, 4], [1, 9, 3, 4], [9, 2, 3, 4]])
    found = accepted(drafts, asked)
    assert found.first == pytest.approx(2 / 3) and found.num_places == 3
    assert found.by_position == pytest.approx((2 / 3, 1 / 2, 0.0, 0.0))
    assert found.tokens_per_step == pytest.approx(1 + 2 / 3 + 1 / 3)
    assert by_label(drafts, asked)["b"].first == 0.0


def test_generated_states_are_those_of_the_text(
    target: TargetModel, pieces: list[TextPiece]
) -> None:
    """A text that is read again has the hidden states of its generation."""
    prompts = [piece.tokens[:length] for piece, length in zip(pieces, (5, 9, 20), strict=True)]
    for prompt, made in zip(prompts, target.generate(prompts, 12, [0.0, 0.7, 1.0], 1), strict=True):
        whole = np.concatenate((prompt[:-1], made.tokens))
        (read,) = target.read([whole])
        assert torch.equal(read.rows[len(prompt) - 1 :].hidden_TD, made.rows.hidden_TD)
    greedy = target.generate(prompts[:1], 12, [0.0], 1)[0]
    assert greedy.tokens[1:].tolist() == greedy.rows.top_ids_TK[:, 0].tolist()


def test_positions_pair_states_with_the_tokens_behind_them() -> None:
    text_T = torch.tensor([0] * 6 + [1] * 5, dtype=torch.int32)
    numbers_T = torch.arange(11)
    rows = Rows(
        hidden_TD=numbers_T[:, None].float(),
        top_ids_TK=numbers_T[:, None] + 100,
        top_logits_TK=torch.zeros(11, 1).half(),
    )
    shard = Shard(tokens_T=numbers_T.int() + 50, text_T=text_T, rows=rows)
    positions = Positions([shard, shard], 3)
    assert positions.usable.tolist() == [0, 1, 2, 6, 7, 11, 12, 13, 17, 18]
    batch = positions.at(torch.tensor([6]), 1.0)
    assert batch.hidden_BD.tolist() == [[6.0]]
    assert batch.tokens_BS.tolist() == [[57, 58, 59]], "the first step is given the next token"
    assert batch.ids_BSK[0, :, 0].tolist() == [107, 108, 109], "and learns what follows that"


def test_a_head_learns_resumes_and_is_judged(
    target: TargetModel, pieces: list[TextPiece], tmp_path: Path
) -> None:
    recipe = Recipe(read_tokens=60, batch=3, count=12, batches=1)
    make_shards(target, pieces, tmp_path, recipe, 4)
    assert len(shard_paths(tmp_path)) == 4
    before = [path.stat().st_mtime_ns for path in shard_paths(tmp_path)]
    make_shards(target, pieces, tmp_path, recipe, 4)
    assert before == [path.stat().st_mtime_ns for path in shard_paths(tmp_path)], "made again"
    shape = HeadShape(width=target.spec.width, hidden=32)

    def trained(budget_s: float) -> Training:
        torch.manual_seed(0)
        head = DraftingHead(shape, target.embedding(), target.final_norm())
        schedule = Schedule(budget_s=budget_s, batch=16, shards_at_once=4)
        training = Training(head, target.output_matrix(), tmp_path, tmp_path, schedule)
        training.run()
        return training

    first = trained(0.3)
    resumed = trained(0.3)
    assert resumed.spent == first.spent and resumed.num_positions == first.num_positions > 0
    for name, tensor in first.average.items():
        assert torch.equal(tensor, resumed.average[name])
    checkpoint = tmp_path / "head.safetensors"
    with pytest.raises(ValueError, match="the limit is 1000"):
        export_weights(checkpoint, tmp_path / "large", max_bytes=1000)
    facts = export_weights(checkpoint, tmp_path / "out")
    assert facts["positions"] == first.num_positions
    table = NgramTable([piece.tokens for piece in pieces], target.spec.vocab_size)
    sizes = Sizes(texts_per_label=1, count=8)
    figures = judge(target, tmp_path / "out", table, pieces, sizes)
    figures |= {"training": facts, "table": {"tokens": 1}}
    write_card(tmp_path / "out", figures)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "first token, greedy" in card and all(label in card for label in TEXTS)


def test_the_bundled_head_drafts_what_the_model_says(
    target: TargetModel, pieces: list[TextPiece]
) -> None:
    folder = demo_model_folder() / "speculation_head"
    figures = json.loads((folder / "figures.json").read_text())
    stated = figures["greedy"]["head"]["all"]["first"]
    assert (folder / "head.safetensors").stat().st_size <= MAX_BUNDLED_BYTES
    asked = ask(target, pieces, temperature=0.0, sizes=Sizes(count=60), seed=0)
    found = accepted(head_drafts(target.speculation_head(folder), asked), asked)
    assert MOST == 4 and found.first > stated - 0.25, f"{found.first} of {found.num_places}"
