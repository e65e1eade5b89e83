"""The parts of the benchmarks that need no engine: figures, ratios, bars, reports, the pipe."""

from __future__ import annotations

import io
import json
import os
import random
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.machine import MachineLimits
from harness.model_size import ModelSize
from harness.work import Work, make_prompts
from offline.contestant import Contestant, ContestantError, TreeMemory
from offline.duel import OWN, parse_peer
from offline.job import Job, Ready, Turn
from offline.report import Duel, Report
from offline.result import Bar, Comparison, Figures, Result, bars_of, figures_of
from offline.worker import serve
from safetensors_file import read_tensors

WORK = Work(single_output=11, batch_size=4, batch_output=3, prefill_prompt=100)
# 10 tokens in 1.5 - 0.5 s; 12 in 4 s; 8 in 4 - 2 s; 100 in 2 s
SAMPLES = {
    "ttft": [0.4, 0.5, 9.0],
    "single": [1.5, 1.5, 1.5],
    "batch_first": [2.0, 2.0, 2.0],
    "batch": [4.0, 4.0, 4.0],
    "prefill": [2.0, 2.0, 2.0],
}
FIGURES = Figures(
    ttft_s=0.5,
    single_decode_tok_s=10.0,
    batch_total_tok_s=3.0,
    batch_decode_tok_s=4.0,
    prefill_tok_s=50.0,
    load_s=2.0,
    peak_gib=3.0,
    rest_gib=1.0,
)
SIZE = ModelSize(
    num_layers=2, num_experts=4, top_k=2, expert=10, dense=100, head=20, embedding=20,
    kv_width=8, attention_width=4, dtype="bfloat16",
)  # fmt: skip
JOB = Job(
    engine="moe-serve", variant="", model="m", gguf=None, dtype="float32", num_threads=1,
    max_model_len=8, max_num_seqs=1,
)  # fmt: skip


def result(engine: str, load_s: float = 2.0) -> Result:
    return Result(
        engine=engine, load_s=load_s, peak_bytes=3 * 2**30, rest_bytes=2**30, samples_s=SAMPLES
    )


def duel(*results: Result, read_gb_s: float = 40.0) -> Duel:
    machine = MachineLimits(
        num_threads=1,
        busy_cores=0.0,
        read_gb_s=read_gb_s,
        gemm_bf16_gflop_s=800.0,
        gemm_fp32_gflop_s=200.0,
    )
    return Duel(machine=machine, results=results)


def report(*duels: Duel) -> Report:
    return Report(model_name="m", model=SIZE, num_threads=1, work=WORK, environment={}, duels=duels)


class TestWork:
    def test_same_seed_same_prompts_and_no_shared_prefix(self) -> None:
        batch = next(kind for kind in WORK.kinds() if kind.name == "batch")
        prompts = make_prompts(random.Random(7), batch, vocab_size=4096)
        assert prompts == make_prompts(random.Random(7), batch, vocab_size=4096), "they differ"
        assert [len(prompt) for prompt in prompts] == [128] * 4, "wrong sizes"
        assert len({prompt[0] for prompt in prompts}) == 4, "two prompts begin alike"

    def test_longest_of_the_three(self) -> None:
        assert WORK.longest == 139, "128 in and 11 out is longer than 128 + 3 and 100 + 1"


class TestFigures:
    def test_by_hand(self) -> None:
        assert figures_of([result("x")], WORK) == FIGURES, "the arithmetic differs"

    def test_pools_what_finished(self) -> None:
        failed = Result(engine="x", error="out of memory")
        pooled = figures_of([result("x", 2.0), failed, result("x", 4.0)], WORK)
        assert pooled == replace(FIGURES, load_s=3.0), "a failed duel counted, or one was lost"
        assert figures_of([failed], WORK) is None, "a failure has figures"


class TestComparison:
    def test_above_one_is_better(self) -> None:
        theirs = replace(FIGURES, ttft_s=1.0, prefill_tok_s=25.0, single_decode_tok_s=0.0)
        comparison = Comparison(peer="x", own=FIGURES, theirs=theirs)
        assert comparison.ratio("ttft_s") == 2.0, "half the time is twice as good"
        assert comparison.ratio("prefill_tok_s") == 2.0, "twice the rate is twice as good"
        assert comparison.ratio("single_decode_tok_s") is None, "nothing to compare with"

    def test_bars_take_the_best_peer(self) -> None:
        def versus(peer: str, single: float, batch: float) -> Comparison:
            theirs = replace(FIGURES, single_decode_tok_s=single, batch_total_tok_s=batch)
            return Comparison(peer=peer, own=FIGURES, theirs=theirs)

        peers = [versus("llama.cpp", 5.0, 1.0), versus("vllm/eager", 9.0, 2.5)]
        bars = bars_of(FIGURES, peers, checkpoint_bytes=2 * 2**30, cache_bytes=2**29)
        assert bars == [
            Bar(what="one stream", wanted=">= 1.30x", measured="2.00x of llama.cpp", is_met=True),
            Bar(
                what="many at once", wanted=">= 1.25x", measured="1.20x of vllm/eager", is_met=False
            ),
            Bar(what="prefill", wanted=">= 1.05x", measured="1.00x of llama.cpp", is_met=False),
            Bar(what="peak memory (GiB)", wanted="<= 3.00", measured="3.00", is_met=True),
            Bar(what="load (s)", wanted="<= 5.00", measured="2.00", is_met=True),
        ], "a verdict differs"

    def test_without_peers_nothing_is_claimed(self) -> None:
        bars = bars_of(None, [], checkpoint_bytes=1, cache_bytes=0)
        assert [bar.is_met for bar in bars] == [None] * 5, "a verdict without a measurement"


class TestParsePeer:
    def test_forms(self) -> None:
        peer = parse_peer("vllm/eager=/envs/v/bin/python")
        assert (peer.name, peer.python) == ("vllm/eager", "/envs/v/bin/python"), peer
        peer = parse_peer("transformers")
        assert (peer.name, peer.python) == ("transformers/grouped_mm", sys.executable), peer
        assert parse_peer("llama.cpp=python").name == "llama.cpp", "it has no variants"

    @pytest.mark.parametrize("text", ["vlm", "vllm/fast", "llama.cpp/eager"])
    def test_unknown(self, text: str) -> None:
        with pytest.raises(ArgumentTypeError, match="must be one of llama.cpp, vllm|no variant"):
            parse_peer(text)


class TestReport:
    def test_a_new_duel_replaces_the_old_one(self) -> None:
        old, new = duel(result(OWN), result("a")), duel(result(OWN, 9.0), result("a"))
        other = duel(result(OWN), result("b"))
        assert report(old, other).with_duel(new).duels == (other, new), "not replaced"

    def test_machine_is_the_median(self) -> None:
        duels = [duel(result(OWN), read_gb_s=rate) for rate in (30.0, 70.0, 40.0)]
        assert report(*duels).machine().read_gb_s == 40.0, "not the median"

    def test_merge_reads_what_write_wrote(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "report.json"
        first = report(duel(result(OWN), result("a")))
        first.write(path)
        assert report().merged(path) == first, "something was lost"
        assert json.loads(path.read_text("utf-8"))["bars"][4]["is_met"], "no verdicts in the file"

    def test_merge_refuses_other_work(self, tmp_path: Path) -> None:
        path = tmp_path / "report.json"
        report(duel(result(OWN))).write(path)
        with pytest.raises(SystemExit, match="another work"):
            replace(report(), work=Work(repeat=9)).merged(path)


class Counting:
    """Answers 1, 2, 3, ..."""

    def ready(self) -> Ready:
        return Ready(versions={}, cache_bytes=None)

    def generate(self, prompts: list[list[int]], num_output: int) -> list[list[int]]:
        return [list(range(1, num_output + 1)) for _ in prompts]


def test_worker_answers_line_by_line() -> None:
    turns = ['{"prompts": [[5], [6]], "num_output": 2}\n', '{"prompts": [[5]], "num_output": 1}\n']
    replies = io.StringIO()
    serve(Counting(), turns, replies)
    answers = [json.loads(line)["token_ids"] for line in replies.getvalue().splitlines()]
    assert answers == [[[1, 2], [1, 2]], [[1]]], "wrong answers"


READY_THEN = """
import json, sys
sys.stdin.readline()
print(json.dumps({"versions": {"x": "1"}, "cache_bytes": 7}), flush=True)
"""
ANSWERS = (
    READY_THEN
    + """
for line in sys.stdin:
    print(json.dumps({"seconds": 0.5, "token_ids": [[3]]}), flush=True)
"""
)
DIES = (
    READY_THEN
    + """
sys.stdin.readline()
raise MemoryError("12 GB more, please")
"""
)


class TestContestant:
    @contextmanager
    def running(self, program: str, folder: Path) -> Iterator[Contestant]:
        contestant = Contestant([sys.executable, "-c", program], os.environ, folder)
        try:
            yield contestant
        finally:
            contestant.close()

    def test_turns(self, tmp_path: Path) -> None:
        with self.running(ANSWERS, tmp_path) as contestant:
            ready, load_s = contestant.make(JOB)
            assert (ready.versions, ready.cache_bytes) == ({"x": "1"}, 7), ready
            assert load_s > 0, "loading took no time"
            for _ in range(2):  # it was stopped in between
                answer = contestant.generate(Turn(prompts=[[1]], num_output=1))
                assert answer.token_ids == [[3]], answer
            assert contestant.memory.peak_bytes > 0, "a process without memory"

    def test_last_words(self, tmp_path: Path) -> None:
        with self.running(DIES, tmp_path) as contestant:
            contestant.make(JOB)
            with pytest.raises(ContestantError, match="MemoryError: 12 GB more, please"):
                contestant.generate(Turn(prompts=[[1]], num_output=1))

    def test_a_signal_is_named(self, tmp_path: Path) -> None:
        """The last line that a process printed need not be the cause of its end, so the signal is
        named."""
        program = DIES.replace(
            'raise MemoryError("12 GB more, please")',
            'os.write(2, b"reserved 27 MiB"); os.kill(os.getpid(), 4)',
        ).replace("import ", "import os, ", 1)
        with self.running(program, tmp_path) as contestant:
            contestant.make(JOB)
            with pytest.raises(ContestantError, match="ended by SIGILL after 'reserved 27 MiB'"):
                contestant.generate(Turn(prompts=[[1]], num_output=1))


def test_memory_of_this_process() -> None:
    memory = TreeMemory(os.getpid())
    memory.look()
    assert memory.peak_bytes >= memory.proportional_bytes() > 0, "the peak is below the size"


def test_safetensors_without_torch(tmp_path: Path) -> None:
    tensors = {
        "half": torch.tensor([[1.5, -2.0, 3.25]], dtype=torch.bfloat16),
        "single": torch.arange(4, dtype=torch.float32).reshape(2, 2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    read = read_tensors(tmp_path)
    assert {name: t.dtype for name, t in read.items()} == {"half": "BF16", "single": "F32"}, read
    for name, tensor in tensors.items():
        assert read[name].as_float32().tolist() == tensor.tolist(), f"{name} was read wrongly"
