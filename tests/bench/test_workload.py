"""The workload: the times of requests, their prompts and lengths, and traces."""

from __future__ import annotations

import gzip
import json
import lzma
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from moe_serve.bench.client.endpoint import Endpoint
from moe_serve.bench.workload.prompt_maker import (
    Block,
    FilePrompt,
    PromptMaker,
    Slot,
    TextScale,
    read_prompts,
)
from moe_serve.bench.workload.trace_rows import Trace, TraceCut, TraceRow, read_trace
from moe_serve.bench.workload.workload import GammaArrivals, Lengths, SharedPrefixes, Workload
from moe_serve.errors import BenchError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,16,7
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""


class TestArrivals:
    @pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
    def test_mean_and_variance_of_the_gaps(self, burstiness: float) -> None:
        arrivals = GammaArrivals(rate=8.0, burstiness=burstiness)
        times = list(islice(arrivals.times(np.random.default_rng(1)), 40_000))
        gaps = np.diff(times)
        assert gaps.mean() == pytest.approx(1 / 8, rel=0.04)
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burstiness, rel=0.1)

    def test_a_metronome(self) -> None:
        times = GammaArrivals(rate=4.0, burstiness=0.0).times(np.random.default_rng(1))
        assert list(islice(times, 3)) == [0.25, 0.5, 0.75]

    def test_a_wave_begins_with_its_least_rate(self) -> None:
        """The rate is 100 (1 - 0.8 cos(2 pi t / 100)): 20 at first, 180 at 50 s, 20 at 100 s."""
        arrivals = GammaArrivals(rate=100.0, burstiness=0.0, swing=0.8, period_s=100.0)
        times = np.array(list(islice(arrivals.times(np.random.default_rng(1)), 10_000)))
        assert times[-1] == pytest.approx(100.0) and (np.diff(times) > 0).all()
        counts = [int(((a <= times) & (times < a + 1)).sum()) for a in (0, 25, 50, 75, 99)]
        assert counts == pytest.approx([20, 105, 180, 95, 20], abs=3)


class TestTraces:
    def write(self, folder: Path, name: str, content: str) -> Path:
        path = folder / name
        path.write_text(content, encoding="utf-8")
        return path

    @pytest.mark.parametrize(("content", "second"), [(AZURE, 4.314579), (AZURE_2024, 0.99007)])
    def test_azure(self, tmp_path: Path, content: str, second: float) -> None:
        trace = read_trace(self.write(tmp_path, "a.csv", content))
        assert [row.at_s for row in trace.rows] == pytest.approx([0.0, second], abs=1e-5)
        assert trace.rows[0].prompt_tokens in (374, 2162)

    def test_burst_gpt_leaves_failures_out(self, tmp_path: Path) -> None:
        trace = read_trace(self.write(tmp_path, "b.csv", BURST))
        assert trace.num_skipped == 1
        assert trace.rows == (
            TraceRow(at_s=0.0, prompt_tokens=472, output_tokens=18),
            TraceRow(at_s=113.0, prompt_tokens=417, output_tokens=276),
        )

    def test_mooncake_blocks_and_rounded_times(self, tmp_path: Path) -> None:
        def row(at: int, length: int, ids: list[int]) -> str:
            return json.dumps(
                {"timestamp": at, "input_length": length, "output_length": 9, "hash_ids": ids}
            )

        lines = [row(0, 600, [1, 2]), row(3000, 512, [1]), row(3000, 100, [7]), row(6000, 5, [8])]
        trace = read_trace(self.write(tmp_path, "m.jsonl", "\n".join(lines) + "\n"))
        assert [r.at_s for r in trace.rows] == [0.0, 3.0, 4.5, 6.0], "even within 3 s"
        assert [tuple((b.key, b.num_tokens) for b in r.blocks) for r in trace.rows] == [
            (("hash 1", 512), ("hash 2", 88)),
            (("hash 1", 512),),
            (("hash 7", 100),),
            (("hash 8", 5),),
        ]

    def test_our_own(self, tmp_path: Path) -> None:
        rows = [
            {"at_s": 2.5, "prompt_tokens": 20, "output_tokens": 3},
            {"at_s": 0.5, "prompt_tokens": 40, "output_tokens": 4, "prefix": "a",
             "prefix_tokens": 16},
            {"at_s": 3.5, "prompt": "Once upon a time", "output_tokens": 5},
        ]  # fmt: skip
        path = self.write(tmp_path, "own.jsonl", "\n".join(map(json.dumps, rows)))
        first, second, third = read_trace(path).rows
        assert (first.at_s, first.blocks) == (0.0, (Block(key="prefix a", num_tokens=16),))
        assert (second.at_s, second.prompt_tokens) == (2.0, 20)
        assert third.prompt == "Once upon a time"

    @pytest.mark.parametrize("suffix", [".gz", ".xz"])
    def test_packed(self, tmp_path: Path, suffix: str) -> None:
        pack = gzip.compress if suffix == ".gz" else lzma.compress
        path = tmp_path / f"a.csv{suffix}"
        path.write_bytes(pack(AZURE.encode()))
        assert len(read_trace(path).rows) == 2

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.csv", "time,in,out\n1,2,3\n", "no column TIMESTAMP.*it has time, in, out"),
            ("a.csv", AZURE + "soon,1,2\n", "line 4 of .* is not a request: soon, 1, 2"),
            ("a.csv", AZURE + "nan,1,2\n", "line 4"),
            ("a.csv", AZURE[:40], "no request with a prompt"),
            ("a.jsonl", '{"at_s": 1}\n', "line 1 of .* is not a request"),
            ("a.jsonl", "[]\n", "line 1"),
            ("a.csv.xz", "no xz", "cannot unpack"),
            ("a.csv", AZURE[:40] + f'1,2,"{"9" * 200_000}"\n', "is not CSV: field larger than"),
        ],
    )
    def test_refused(self, tmp_path: Path, name: str, content: str, message: str) -> None:
        with pytest.raises(BenchError, match=message):
            read_trace(self.write(tmp_path, name, content))

    def test_a_broken_archive_is_refused(self, tmp_path: Path) -> None:
        lines = "".join(f"{i},{i * 7919 % 1000 + 1},3\n" for i in range(500))
        packed = bytearray(gzip.compress((AZURE[:40] + lines).encode()))
        packed[40:60] = bytes(byte ^ 0x5A for byte in packed[40:60])
        (tmp_path / "a.csv.gz").write_bytes(packed)
        with pytest.raises(BenchError, match="cannot unpack .*a.csv.gz"):
            read_trace(tmp_path / "a.csv.gz")

    def test_times_without_a_zone_do_not_depend_on_the_machine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")  # an hour came twice that night
        time.tzset()
        try:
            night = "2023-10-29 01:30:00,5,5\n2023-10-29 03:30:00,5,5\n"
            trace = read_trace(self.write(tmp_path, "a.csv", AZURE[:40] + night))
        finally:
            monkeypatch.undo()
            time.tzset()
        assert [row.at_s for row in trace.rows] == [0.0, 7200.0]


ROWS = tuple(
    TraceRow(
        at_s=float(i),
        prompt_tokens=100 * (i + 1),
        output_tokens=10,
        blocks=(Block(key="a", num_tokens=50), Block(key=str(i), num_tokens=50)),
    )
    for i in range(4)
)


class TestTraceCut:
    def test_part_time_and_lengths(self) -> None:
        cut = TraceCut(start_s=1.0, max_requests=2, scale_time=0.5, scale_prompt=0.4, max_prompt=90)
        trace = cut.of(Trace(rows=ROWS))
        assert [(r.at_s, r.prompt_tokens) for r in trace.rows] == [(0.0, 80), (0.5, 90)]
        assert [block.num_tokens for block in trace.rows[0].blocks] == [20, 20]
        assert cut.num_cut(Trace(rows=ROWS)) == 1, "120 became 90"

    def test_blocks_end_with_the_prompt(self) -> None:
        row = TraceCut(max_prompt=60).of(Trace(rows=ROWS)).rows[0]
        assert [block.num_tokens for block in row.blocks] == [50, 10]

    def test_a_prompt_of_the_trace_itself_is_not_cut(self) -> None:
        own = tuple(replace(row, prompt="own words") for row in ROWS)
        cut = TraceCut(max_prompt=60)
        assert cut.num_cut(Trace(rows=own)) == 0
        assert cut.of(Trace(rows=own)).rows[0].prompt == "own words"

    def test_nothing_left(self) -> None:
        with pytest.raises(BenchError, match=r"ends after 3\.0 s: --trace-start 9"):
            TraceCut(start_s=9.0).of(Trace(rows=ROWS))


def slot(index: int, num_tokens: int, *blocks: Block) -> Slot:
    return Slot(index=index, at_s=0.0, prompt_tokens=num_tokens, output_tokens=1, blocks=blocks)


class TestPrompts:
    def test_token_ids_have_the_length_and_the_shared_part(self) -> None:
        maker = PromptMaker(kind="tokens", seed=3, vocab_size=500)
        block = Block(key="k", num_tokens=20)
        one, two = maker.prompt(slot(0, 50, block)), maker.prompt(slot(1, 30, block))
        assert isinstance(one, list) and isinstance(two, list)
        assert (len(one), len(two), one[:20] == two[:20], one[20] == two[20]) == (
            50, 30, True, False,
        )  # fmt: skip
        assert all(isinstance(token, int) and 16 <= token < 500 for token in one)

    def test_words_follow_the_scale(self) -> None:
        maker = PromptMaker(kind="words", seed=3, scale=TextScale(per_word=2.0, overhead=6.0))
        prompt = maker.prompt(slot(0, 106, Block(key="k", num_tokens=40)))
        assert isinstance(prompt, str) and len(prompt.split()) == 50, prompt

    def test_seeds(self) -> None:
        same = [PromptMaker(kind="words", seed=s).prompt(slot(0, 30)) for s in (1, 1, 2)]
        assert same[0] == same[1] != same[2]

    def test_scale_through_two_points(self) -> None:
        assert TextScale.through((16, 35), (272, 547)) == TextScale(per_word=2.0, overhead=3.0)
        assert TextScale.through((16, 35), (272, 35)) == TextScale(), "a server that counts oddly"

    def test_file(self, tmp_path: Path) -> None:
        path = tmp_path / "p.jsonl"
        path.write_text('"a b"\n\n{"prompt": [3, 4], "max_tokens": 7}\n{"messages": [{}]}\n')
        assert read_prompts(path) == (
            FilePrompt(prompt="a b"),
            FilePrompt(prompt=[3, 4], output_tokens=7),
            FilePrompt(prompt=[{}]),
        )
        text = path.with_suffix(".txt")
        text.write_text("one\r\ntwo\x0c2\n")
        assert [line.prompt for line in read_prompts(text)] == ["one", "two\x0c2"]

    def test_a_line_ends_where_json_lines_end(self, tmp_path: Path) -> None:
        path, prompt = tmp_path / "p.jsonl", "one\u2028line\x85"
        path.write_text(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n", "utf-8")
        assert read_prompts(path) == (FilePrompt(prompt=prompt),)

    def test_half_a_surrogate_pair_is_refused(self) -> None:
        with pytest.raises(BenchError, match=r"half of a surrogate pair \(such as \\ud83d\)"):
            Endpoint(name="completions", model="m").body("\ud83d", 1)

    @pytest.mark.parametrize("line", ["{", "{}", '{"prompt": []}', '{"prompt": [true]}', "3"])
    def test_no_prompt(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "p.jsonl"
        path.write_text(f'"fine"\n{line}\n')
        with pytest.raises(BenchError, match="line 2 of"):
            read_prompts(path)


class TestWorkload:
    def test_lengths_and_prefixes_are_drawn(self) -> None:
        workload = Workload(
            seed=1,
            concurrency=2,
            num_requests=200,
            prompt_tokens=Lengths.parse("--prompt-tokens", "10:20"),
            prefixes=SharedPrefixes(num_tokens=5, num_prefixes=3),
        )
        slots = list(workload.slots())
        assert slots == list(workload.slots()), "the same seed gives others"
        assert {s.prompt_tokens for s in slots} == set(range(15, 26))
        assert {s.blocks[0].key for s in slots} == {"shared 0", "shared 1", "shared 2"}

    def test_trace_with_its_own_times_ends_with_it(self) -> None:
        workload = Workload(seed=1, trace=Trace(rows=ROWS), duration_s=2.5)
        assert [s.at_s for s in workload.slots()] == [0.0, 1.0, 2.0]
        assert workload.planned == 4 and workload.is_open

    def test_trace_as_a_stock_of_lengths(self) -> None:
        workload = Workload(seed=1, concurrency=3, trace=Trace(rows=ROWS), num_requests=6)
        assert [s.prompt_tokens for s in workload.slots()] == [100, 200, 300, 400, 100, 200]

    def test_prompts_of_a_trace_may_share_what_nobody_sees(self) -> None:
        rows = tuple(replace(row, blocks=()) for row in ROWS)
        assert not Workload(seed=1, trace=Trace(rows=rows)).shares_prompts
        own = (*rows, replace(rows[0], prompt="a chat's history"))
        assert Workload(seed=1, trace=Trace(rows=own)).shares_prompts

    def test_rate_for_a_time(self) -> None:
        arrivals = GammaArrivals(rate=100.0, burstiness=0.0)
        slots = list(Workload(seed=1, arrivals=arrivals, duration_s=1.0).slots())
        assert len(slots) == pytest.approx(99, abs=1) and slots[-1].at_s < 1.0

    def test_prompts_of_a_file_come_in_turn(self) -> None:
        files = (FilePrompt(prompt="a"), FilePrompt(prompt="b", output_tokens=9))
        slots = Workload(seed=1, concurrency=1, num_requests=3, files=files).slots()
        assert [(s.prompt, s.output_tokens) for s in slots] == [("a", 64), ("b", 9), ("a", 64)]

    @pytest.mark.parametrize("text", ["", "0", "5:4", "a", "3:", "-1"])
    def test_wrong_lengths(self, text: str) -> None:
        with pytest.raises(BenchError, match="--x must (be N or LOW:HIGH|have 1 <= LOW <= HIGH)"):
            Lengths.parse("--x", text)
