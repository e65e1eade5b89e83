"""`moe-serve place`: commands, their output, and mistakes of users."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from experts.placement import problem_sources
from experts.placement.judge.copies import placement_of as placement_of_copies
from experts.placement.placement_error import PlacementError
from experts.placement.plan_file import read_placement, write_placement
from experts.placement.problem.placement import contiguous
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Progress, Solution, Solver
from experts.placement.solvers.references import Consecutive
from experts.placement.solvers.search.search_solver import Search
from moe_serve.cli.main import main
from moe_serve.cli.place import place_plan
from moe_serve.cli.place.place import spread
from moe_serve.cluster.members.cluster_model import placement_of
from moe_serve.config.sections import ClusterConfig, ModelConfig
from moe_serve.engine.opened_model import ServedCheckpoint
from moe_serve.model.checkpoint.checkpoint import demo_model_folder

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "configs" / "placement" / "demo-model.safetensors"
CLUSTER = ROOT / "configs" / "placement" / "eight-devices.yaml"

Capture = pytest.CaptureFixture[str]


def run(*arguments: object) -> int:
    """Returns the exit code of `moe-serve place ARGUMENTS`."""
    with pytest.raises(SystemExit) as exit_info:
        main(["place", *map(str, arguments)])
    code = exit_info.value.code
    assert code is None or isinstance(code, int)
    return code or 0


@pytest.fixture
def loads(tmp_path: Path) -> list[Path]:
    """Two workloads of 3 layers and 16 experts; two devices hold half of each."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(2):
        counts = rng.multinomial(9000, rng.dirichlet(np.full(16, 0.7)), 3)
        paths.append(tmp_path / f"day{number}.csv")
        paths[-1].write_text("\n".join(",".join(map(str, row)) for row in counts) + "\n")
    return paths


def test_files_that_contradict_themselves_or_the_flags(
    loads: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    """An expert comes twice in a token; there are fewer or more experts than the file has."""
    twice = np.array([[[0, 1]], [[3, 3]]], np.int64)
    np.save(tmp_path / "twice.npy", twice)
    for arguments, message in (
        (("--trace", tmp_path / "twice.npy"), "token 1 has expert 3 twice in layer 0"),
        (("--load", loads[0], "--num-experts", 8), "--num-experts is 8, but "),
        (("--load", loads[0], "--num-experts", 20), "--num-experts is 20, but "),
        (("--trace", TRACE, "--num-experts", 16), "states 32 experts"),
    ):
        assert run(*arguments, "--devices", 2, "--quick") == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_the_quick_start(tmp_path: Path, capsys: Capture) -> None:
    """The command of the README, and the server's own reader of what it wrote."""
    out, figures = tmp_path / "plan.json", tmp_path / "figures.json"
    asked = ("--trace", TRACE, "--cluster", CLUSTER, "--replicas", 8)
    model = ("--model", demo_model_folder())
    assert run(*asked, *model, "--windows", 2, "--out", out, "--json", figures) == 0
    printed = capsys.readouterr().out
    assert "2 scenarios, 6 layers of 32 experts" in printed and "8 replicas per layer" in printed
    for words in ("bound", "linear", "eplb", "held out", "drift", "replicas", "steps of 64"):
        assert words in printed, words
    report = json.loads(figures.read_text())
    solution, plans = report["solution"], {plan["name"]: plan for plan in report["plans"]}
    assert solution["objective"] >= solution["bound"] >= 1.0
    assert plans["plan"]["objective"] == pytest.approx(solution["objective"])
    assert plans["plan"]["objective"] <= plans["eplb"]["objective"] < plans["linear"]["objective"]
    assert plans["plan"]["memory"] == [6 * 5 * report["problem"]["bytes_per_expert"]] * 8
    assert len(report["held_out"]["held_out"]) == 2
    cluster = ClusterConfig(attention_ranks=1, expert_ranks=8, placement=str(out))
    placement = placement_of(cluster, ServedCheckpoint.read(ModelConfig()).spec)
    assert placement == read_placement(out), "as `moe-serve serve --placement` takes it"
    assert [len(held[0]) for held in map(placement.held_by, range(8))] == [5] * 8


def test_scenarios_are_files_and_windows(loads: list[Path], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    steps = tmp_path / "steps.json"
    steps.write_text(json.dumps({"logical_count": np.ones((4, 3, 16)).tolist()}))
    assert run("--load", *loads, steps, "--devices", 4, "--json", figures, "--quick") == 0
    problem = json.loads(figures.read_text())["problem"]
    assert problem["scenarios"] == ["day0", "day1", "steps"] and problem["slots"] == [4] * 4
    cut = ("--load", steps, "--windows", 2, "--devices", 4, "--json", figures)
    assert run(*cut, "--quick") == 0
    problem = json.loads(figures.read_text())["problem"]
    assert problem["scenarios"] == ["steps 1/2", "steps 2/2"]


def test_what_other_programs_recorded_is_read(tmp_path: Path) -> None:
    counts = (np.arange(12).reshape(2, 6) + 1).tolist()
    slots = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]]
    (tmp_path / "vllm.jsonl").write_text(
        json.dumps(
            {
                "record_type": "eplb_load_stats",
                "version": 1,
                "step": 7,
                "num_ranks": 2,
                "expert_load": counts,
                "p2l_map": slots,
            }
        )
    )
    snapshot = {"step": 1, "window_expert_load": counts, "physical_to_logical_map": slots}
    (tmp_path / "kit.json").write_text(json.dumps({"model_name": "m", "snapshots": [snapshot]}))
    (tmp_path / "trtllm").mkdir()
    (tmp_path / "trtllm" / "meta_info.json").write_text('{"num_experts": 4}')
    table = {f"100_{layer}": np.array([1, 2, 3, 4], np.int32) for layer in (0, 1)}
    save_file(table, tmp_path / "trtllm" / "rank0.safetensors")
    np.save(tmp_path / "ids.npy", np.arange(40).reshape(10, 2, 2) % 4)
    (tmp_path / "sglang.json").write_text('{"logical_count": [[1, 2, 3, 4], [4, 3, 2, 1]]}')
    names = ("vllm.jsonl", "kit.json", "trtllm", "ids.npy", "sglang.json")
    figures = tmp_path / "figures.json"
    files = [tmp_path / name for name in names]
    assert run("--load", *files, "--devices", 2, "--quick", "--json", figures) == 0
    problem = json.loads(figures.read_text())["problem"]
    assert problem["scenarios"] == ["vllm", "kit", "trtllm", "ids", "sglang"]


def test_a_model_numbers_the_layers(tmp_path: Path, capsys: Capture) -> None:
    """Layers that are counted among the layers with experts get the model's numbers."""
    load, plan = tmp_path / "counts.csv", tmp_path / "sglang.json"
    load.write_text("1,2,3,4\n4,3,2,1\n")
    asked = ("--load", load, "--devices", 2, "--quick", "--export", "sglang", plan)
    assert run(*asked) == 2
    assert "SGLang needs a row for every layer" in capsys.readouterr().err
    assert run(*asked, "--dense-layers", "0,2") == 0
    rows = json.loads(plan.read_text())["physical_to_logical_map"]
    assert len(rows) == 4 and rows[0] == rows[2] == [0, 1, 2, 3]
    told = ("check", plan, "--num-layers", 4, "--dense-layers", "0,2", "--num-experts", 4)
    assert run(*told, "--devices", 2) == 0
    assert "2 layers of 4 experts with 0 replicas on 2 devices" in capsys.readouterr().out
    assert run("check", plan, "--num-layers", 5, "--dense-layers", "0,2", "--devices", 2) == 1
    assert "4 rows, but the model has 5 layers" in capsys.readouterr().out


def test_moves_from_the_plan_in_use(loads: list[Path], tmp_path: Path, capsys: Capture) -> None:
    now, then, figures = (tmp_path / name for name in ("now.json", "then.json", "figures.json"))
    write_placement(contiguous([0, 1, 2], 16, 4), now)
    asked = ("--load", loads[0], "--devices", 4, "--nodes", 2, "--quick", "--out", then)
    more = ("--current", now, "--max-moves", 4, "--bytes-per-expert", 10**9)
    assert run(*asked, *more, "--json", figures) == 0
    moves = json.loads(figures.read_text())["moves"]
    assert 0 < moves["most_of_layer"] <= 4 and moves["num_bytes"] == moves["copies"] * 10**9
    before, after = read_placement(now), read_placement(then)
    moved = [
        len(set(after.ranks_of[layer][e]) - set(before.ranks_of[layer][e]))
        for layer in range(3)
        for e in range(16)
    ]
    assert sum(moved) == moves["copies"]
    assert "copies, at most" in capsys.readouterr().out


def test_every_format_there_and_back(loads: list[Path], tmp_path: Path, capsys: Capture) -> None:
    """Compare and show read each file of `--export` as the same plan as the file of --out."""
    plan = tmp_path / "plan.json"
    asked = ("--load", loads[0], "--devices", 4, "--replicas", 4, "--num-layers", 3)
    files = []
    for name, suffix in (("sglang", "json"), ("vllm", "jsonl"), ("trtllm", "yaml"),
                         ("ascend", "json"), ("csv", "csv")):  # fmt: skip
        files.append(tmp_path / f"{name}.{suffix}")
        assert run(*asked, "--quick", "--out", plan, "--export", name, files[-1]) == 0
    files.append(tmp_path / "told by what is in it")
    files[-1].write_text((tmp_path / "trtllm.yaml").read_text())
    figures = tmp_path / "figures.json"
    assert run("compare", *asked, "--plan", plan, *files, "--json", figures) == 0
    plans = json.loads(figures.read_text())["plans"]
    objectives = {each["name"]: each["objective"] for each in plans}
    assert {objectives[path.name] for path in files} == {objectives["plan.json"]}
    assert {"plan", "eplb", "round-robin", "linear"} <= objectives.keys()
    assert "The engines' own default here is eplb." in capsys.readouterr().out


def test_a_plan_of_another_engine_becomes_ours(
    loads: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    """`serve --placement` refuses another engine's plan and names the command that converts it."""
    theirs, ours, out = tmp_path / "theirs.json", tmp_path / "ours.json", tmp_path / "out.json"
    asked = ("--load", loads[0], "--devices", 4, "--replicas", 4, "--quick")
    assert run(*asked, "--out", ours, "--export", "vllm", theirs) == 0
    with pytest.raises(PlacementError, match="--current PLAN --max-moves 0"):
        read_placement(theirs)
    others = ("--load", loads[1], *asked[2:])
    assert run(*others, "--current", theirs, "--max-moves", 0, "--out", out) == 0
    assert read_placement(out) == read_placement(ours), "whatever the loads are"


def test_show_and_its_pictures(loads: list[Path], tmp_path: Path, capsys: Capture) -> None:
    plan = tmp_path / "plan.json"
    assert run("--load", loads[0], "--devices", 4, "--quick", "--out", plan) == 0
    capsys.readouterr()
    for name in ("map.png", "map.html"):
        assert run("show", plan, "--load", *loads, "--heatmap", tmp_path / name) == 0
        shown = capsys.readouterr().out
        assert "busiest device" in shown and f"{tmp_path / name}" in shown
        assert "memory" not in shown, "nobody said what an expert weighs"
    assert run("show", plan, "--load", loads[0], "--bytes-per-expert", 10**5) == 0
    shown = capsys.readouterr().out
    assert "memory" in shown and shown.count("1.20 MB") == 4, "4 experts of each of 3 layers"
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "map.html").read_text()
    assert page.count("<td") == 2 * 3 * 4 and 'title="layer 2, device 3: ' in page


def test_ctrl_c_writes_the_best_so_far(
    loads: list[Path], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Search):
        def solve(
            self,
            problem: PlacementProblem,
            *,
            seconds: float | None = None,
            report: Callable[[Progress], bool] | None = None,
        ) -> Solution:
            signal.raise_signal(signal.SIGINT)
            assert report is not None
            assert not report(Progress(objective=2.0, bound=1.0, done=0.1, seconds=0.1))
            return super().solve(problem, seconds=seconds, report=report)

    monkeypatch.setattr(place_plan, "make_solver", lambda *_, **__: Interrupted())
    out = tmp_path / "plan.json"
    assert run("--load", *loads, "--devices", 4, "--out", out) == 130
    printed = capsys.readouterr()
    assert "interrupted: this is the best plan so far" in printed.out
    assert "ending with the best plan so far" in printed.err and "held out" not in printed.out
    read_placement(out).check_fits([0, 1, 2], 16, 4)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_a_comparison_is_told(
    loads: list[Path], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = place_plan.make_solver

    class Interrupted(Search):
        def solve(self, problem: PlacementProblem, **rest: Any) -> Solution:
            signal.raise_signal(signal.SIGINT)
            return super().solve(problem, **rest)

    def make(name: str, num_groups: int) -> Solver:
        return Interrupted() if name == "search" else usual(name, num_groups)

    monkeypatch.setattr(place_plan, "make_solver", make)
    assert run("compare", "--load", *loads, "--devices", 4) == 130
    printed = capsys.readouterr()
    assert "round-robin" in printed.out and "ending with the best plan so far" in printed.err
    assert "interrupted: plans of the search are the best so far" in printed.out


def test_ctrl_c_before_a_plan_says_so(
    loads: list[Path], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(problem_sources, "read_workloads", interrupted)
    out = tmp_path / "plan.json"
    assert run("--load", *loads, "--devices", 4, "--out", out) == 130
    printed = capsys.readouterr()
    assert printed.err == "\ninterrupted while reading: no plan was made and nothing was written\n"
    assert not printed.out and not out.exists()


def test_check_names_what_does_not_fit(tmp_path: Path, capsys: Capture) -> None:
    plan, cluster = tmp_path / "plan.json", tmp_path / "cluster.yaml"
    write_placement(contiguous(range(6), 32, 8), plan)
    fits = ("check", plan, "--model", demo_model_folder(), "--cluster", CLUSTER)
    assert run(*fits) == 0 and "fits: " in capsys.readouterr().out
    cluster.write_text("nodes: [{devices: 8, slots: 3}]\n")
    assert run(*fits[:-1], cluster) == 1
    assert "device 0 has 3 slots, and the plan puts 4 copies" in capsys.readouterr().out
    cluster.write_text("nodes: [{devices: 8, memory_gib: 0.001}]\n")
    assert run(*fits[:-1], cluster) == 1
    assert "for 24 copies in 6 layers, and has 0.00 GiB" in capsys.readouterr().out
    cluster.write_text("nodes: [{devices: 4}]\n")
    assert run(*fits[:-1], cluster) == 1
    assert "for 32 experts on 8 ranks, but the model has 32 on 4" in capsys.readouterr().out
    plan.write_text('{"physical_to_logical_map": [[0]], "comment": "mine"}')
    assert run(*fits) == 1
    assert "unknown (['comment'])" in capsys.readouterr().out
    assert run("check", tmp_path / "none.json") == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_check_with_a_part_of_the_model(tmp_path: Path, capsys: Capture) -> None:
    """With layers alone or experts alone, the known part is compared and the missing part is
    named."""
    plan = tmp_path / "plan.json"
    write_placement(contiguous([1, 2], 4, 2), plan)
    layers = ("check", plan, "--num-layers", 3, "--dense-layers")
    assert run(*layers, "0-1") == 1
    assert "not in the model are [1]" in capsys.readouterr().out
    assert run("check", plan, "--num-experts", 7) == 1
    assert "for 4 experts on 2 ranks, but the model has 7" in capsys.readouterr().out
    assert run(*layers, "0") == 0
    printed = capsys.readouterr().out
    assert "fits: " in printed and "the number of experts in a layer was not checked" in printed
    assert run(*layers, "0", "--num-experts", 4) == 0
    assert "number of experts" not in capsys.readouterr().out


def test_copies_that_eplb_doubles_are_told(tmp_path: Path, capsys: Capture) -> None:
    """EPLB gives expert 0 five of ten copies on two devices; a placement has two of them."""
    path, plan = tmp_path / "hot.csv", tmp_path / "plan.jsonl"
    path.write_text("100,30,1,1,1,1\n")
    asked = ("--load", path, "--devices", 2, "--replicas", 4, "--quick", "--export", "vllm", plan)
    assert run(*asked, "--solver", "eplb") == 0
    printed = capsys.readouterr().out
    num_redundant = json.loads(plan.read_text())["num_redundant_experts"]
    assert f"num_redundant_experts {num_redundant} in --eplb-config" in printed
    assert (
        f"{4 - num_redundant} copies were on a device that already has a copy of their expert"
        in printed
    )
    assert run(*asked) == 0
    printed = capsys.readouterr().out
    assert "num_redundant_experts 4 in --eplb-config" in printed and "beside" not in printed


def test_replicas_that_a_plan_needs_anyway(tmp_path: Path, capsys: Capture) -> None:
    """Five experts on two equal devices need at least one replica, so 0 is not possible."""
    path, figures = tmp_path / "five.csv", tmp_path / "figures.json"
    path.write_text("5,4,3,2,1\n")
    assert run("--load", path, "--devices", 2, "--replicas", 1, "--json", figures) == 0
    sentence = json.loads(figures.read_text())["replicas"]["sentence"]
    assert sentence.startswith("1 replica: 3 in each layer (40.0% more memory) would lower"), (
        sentence
    )
    assert run("--load", path, "--devices", 2, "--replicas", 3, "--json", figures) == 0
    sentence = json.loads(figures.read_text())["replicas"]["sentence"]
    assert sentence.startswith("3 replicas in each layer (40.0% more memory) lower"), sentence
    assert " with 1 to " in sentence


def test_replicas_are_copies_and_not_empty_slots(
    loads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that leaves slots empty has three more copies in one layer and one in the others."""
    copies_LED = np.zeros((3, 16, 4), dtype=np.int64)
    copies_LED[:, range(16), np.arange(16) % 4] = 1
    copies_LED[:, 0, 1] = copies_LED[0, 1, 0] = copies_LED[0, 2, 0] = 1
    plan = placement_of_copies(copies_LED, (0, 1, 2))

    def few(self: Search, problem: PlacementProblem, **_: object) -> Solution:
        linear = Consecutive().solve(problem)
        return replace(linear, placement=plan) if problem.num_replicas == 16 else linear

    monkeypatch.setattr(Search, "solve", few)
    figures = tmp_path / "figures.json"
    asked = ("--load", loads[0], "--devices", 4, "--replicas", 16, "--no-fill")
    assert run(*asked, "--json", figures) == 0
    sentence = json.loads(figures.read_text())["replicas"]["sentence"]
    assert sentence.startswith("Up to 3 replicas in each layer (10.4% more memory) lower"), sentence


@pytest.mark.parametrize(
    ("solver", "column"),
    [
        ("linear", "plan without it"),
        ("search", "plan without it"),
        ("ilp", "search without it"),
    ],
)
def test_a_scenario_is_held_out_by_the_solver_of_the_plan(
    loads: list[Path], tmp_path: Path, capsys: Capture, solver: str, column: str
) -> None:
    """The table names the solver of the plans without the scenario. The linear plan knows no load,
    so it is the same with and without it."""
    figures = tmp_path / "figures.json"
    asked = ("--load", *loads, "--devices", 4, "--solver", solver, "--seconds", 2)
    assert run(*asked, "--json", figures) == 0
    assert column in capsys.readouterr().out
    held = json.loads(figures.read_text())["held_out"]
    assert held["solver"] == ("linear" if solver == "linear" else "search")
    assert solver != "linear" or all(one["seen"] == one["unseen"] for one in held["held_out"])


def test_check_of_what_is_no_plan(loads: list[Path], tmp_path: Path, capsys: Capture) -> None:
    """The exit code is 2, with one sentence, because nothing could be compared."""
    for name, content, what in (
        (
            "text.json",
            b"hello",
            "is not a plan: it is neither JSON nor a table of experts (Expecting",
        ),
        ("text.yaml", b"a: [", "is not a plan: it is not valid YAML (while"),
        ("list.json", b"[1]", "is not a plan: a plan must be a JSON or YAML object"),
        ("none.json", b"{}", "is not a plan: its keys are not those of any known plan: none"),
        ("bytes.json", b"\xff\xfe\x00", "is not a plan: it is not UTF-8 text"),
        ("day.csv", loads[0].read_bytes(), "holds recorded loads and is not a plan"),
        ("day.json", b'{"logical_count": [[1, 2], [3, 4]]}', "holds recorded loads and is not"),
        ("demo.safetensors", TRACE.read_bytes(), "holds recorded loads and is not a plan"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        assert run("check", path, "--devices", 4) == 2, name
        printed, error = capsys.readouterr()
        assert error.startswith(f"error: {path} {what}") and error.count("\n") == 1, error
        assert (
            "give a file that `moe-serve place` wrote (with --out or --export)" in error
            and not printed
        )


def test_check_of_aliases_of_aliases(tmp_path: Path, capsys: Capture) -> None:
    lines = [f"  {i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 18)]
    path = tmp_path / "plan.yaml"
    path.write_text("\n".join(["initial_global_assignments:", "  0: &a0 [0, 1]", *lines, ""]))
    assert run("check", path, "--devices", 2) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: the aliases of {path} repeat ") and error.count("\n") == 1


def test_planning_loads_nothing_heavy(loads: list[Path]) -> None:
    arguments = ["place", "--load", str(loads[0]), "--devices", "4"]
    code = (
        "import sys\nfrom moe_serve.cli.main import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code, end.code\n"
        "print([m for m in ('torch', 'matplotlib', 'triton') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n[]\n") and done.stderr == "", "and no progress in a pipe"


def test_files_after_one_flag() -> None:
    assert spread(["--load", "a", "b", "--out", "c"]) == [
        "--load",
        "a",
        "--load",
        "b",
        "--out",
        "c",
    ]
    assert spread(["--load", "a", "--load", "b"]) == ["--load", "a", "--load", "b"]
    assert spread(["show", "p", "--trace", "a"]) == ["show", "p", "--trace", "a"]


def mistakes(folder: Path) -> list[tuple[tuple[Any, ...], str]]:
    """Returns arguments and the message for each."""
    good, day = folder / "good.csv", ("--load", folder / "good.csv")
    good.write_text("1,2,3,4\n4,3,2,1\n")
    for name, text in (
        ("nan", "1,nan,3,4\n"),
        ("negative", "1,2,3,4\n1,2,-3,4\n"),
        ("ragged", "1,2,3,4\n1,2,3\n"),
        ("wide", "1,2,3,4,5\n1,2,3,4,5\n"),
        ("long", "1,2,3,4\n" * 3),
        ("zero", "0,0,0,0\n"),
        ("huge", "1,2,1e308,4\n"),
    ):
        (folder / f"{name}.csv").write_text(text)
    for name, text in (
        ("few", "nodes: [{devices: 2, slots: 1}]"),
        ("memory", "nodes: [{devices: 2, memory_gib: 0.001}]"),
        ("some", "nodes: [{devices: [{slots: 2}, {}]}]"),
        ("uneven", "nodes: [{devices: [{slots: 3}, {slots: 1}]}]"),
        ("key", "nodes: [{devices: 2, gpus: 1}]"),
        ("twice", "nodes: [{devices: 2}]\nnodes: []"),
        ("none", "nodes: []"),
        ("speed", "nodes: [{devices: 2, speed: 0}]"),
        ("endless", "nodes: [{devices: 2, memory_gib: .inf}]"),
        ("nan", "nodes: [{devices: [{memory_gib: .nan}]}]"),
        ("sixties", "nodes: [{devices: 2,\n    slots: 1:30}]"),
        ("octal", "nodes: [{devices: 02}]"),
        ("broken", "nodes: [{"),
    ):
        (folder / f"{name}.yaml").write_text(text)
    (folder / "no.name").write_text("1,2,3,4\n")
    (folder / "bytes.json").write_bytes(b"\xff\xfe")
    write_placement(contiguous([0, 1], 4, 4), folder / "of4.json")
    write_placement(contiguous([0, 1], 4, 2), folder / "of2.json")
    two = ("--devices", 2)
    cluster = lambda name: (*day, "--cluster", folder / f"{name}.yaml")  # noqa: E731
    return [
        ((), "give --cluster FILE or --devices N"),
        (two, "give --trace or --load"),
        ((*day, *two, "--cluster", "x.yaml"), "not both"),
        ((*day, "--cluster", "x.yaml", "--nodes", 1), "a cluster file states its own nodes"),
        (("--load", folder / "no.csv", *two), "no.csv does not exist"),
        (("--load", folder / "bytes.json", *two), "bytes.json is not UTF-8"),
        (("--load", folder / "nan.csv", *two), "1 numbers that are not finite; the first is nan"),
        (("--load", folder / "negative.csv", *two), "the first is -3.0, of expert 2 in layer 1"),
        (("--load", folder / "ragged.csv", *two), "row 2 must have 4 counts"),
        (("--load", folder / "zero.csv", *two), "all counts are 0"),
        (("--load", good, folder / "wide.csv", *two), "has 4 experts, but"),
        (("--load", good, folder / "long.csv", *two), "has 2 layers (0 to 1), but"),
        ((*day, *two, "--windows", 2), "has only 1 steps, too few for --windows 2"),
        ((*day, "--devices", 3), "4 experts and 0 replicas are 4 slots, which cannot be divided"),
        ((*day, "--devices", 3, "--replicas", 9999), "3 devices: take 8 replicas, or give each"),
        (("--load", folder / "huge.csv", *two), "1 counts are negative, not finite or above 2^53"),
        (("--load", folder / "no.name", *two), "takes any name, with --from"),
        ((*day, "--devices", 3, "--replicas", 1), "take 2 replicas, or give each device"),
        ((*day, "--devices", 4, "--nodes", 3), "4 devices cannot be spread evenly over 3 nodes"),
        ((*day, *two, "--replicas", 6), "has 5 slots, but there are only 4 experts"),
        (cluster("few"), "2 slots on 2 devices cannot hold 4 experts: 2 more are needed"),
        (cluster("memory"), "which needs bytes_per_expert"),
        ((*cluster("memory"), "--bytes-per-expert", 10**6), "bytes for 2 slots in 2 layers"),
        (cluster("some"), "1 of 2 devices state their slots"),
        (cluster("key"), "unknown field `gpus`"),
        (cluster("twice"), "nodes is set twice"),
        (cluster("none"), "at least one node"),
        (cluster("speed"), "speed must be above 0 and finite, got 0.0"),
        (cluster("endless"), "memory_gib must be above 0 and finite, or left out; got inf"),
        (cluster("nan"), "memory_gib must be above 0 and finite, or left out; got nan"),
        (cluster("broken"), "is not valid YAML"),
        (cluster("absent"), "cannot read the cluster file"),
        ((*cluster("uneven"), "--replicas", 1), "need 5 slots in each layer, but the devices of"),
        ((*cluster("uneven"), "--export", "vllm", folder / "x"), "plan again with equal slots"),
        ((*day, *two, "--export", "tensorrt", folder / "x"), "got 'tensorrt'"),
        ((*day, *two, "--export", "trtllm", folder / "x"), "uses the model's layer numbers"),
        ((*day, *two, "--out", folder / "no" / "x"), "is not a folder"),
        ((*day, *two, "--out", folder), "it is a folder"),
        (("--load", folder / "of4.json", *two), "is a plan, not loads"),
        ((*day, *two, "--pin", "0"), "--pin must be [LAYER:]EXPERT@DEVICE, got '0'"),
        ((*day, *two, "--pin", "9@0"), "expert 9 on device 0 in every layer: experts are 0 to 3"),
        ((*day, *two, "--pin", "0@5"), "devices are 0 to 1"),
        ((*day, *two, "--pin", "7:0@0"), "must be one of the 2 layers of the loads, 0 to 1"),
        (
            (*day, *two, "--pin", "0@0", "--pin", "1@0", "--pin", "2@0"),
            "Layer 0 pins 3 experts to device 0, which has 2 slots",
        ),
        (
            (*day, *two, "--groups", 3),
            "num_groups (--groups) must divide the 4 experts of a layer, got 3",
        ),
        ((*day, *two, "--max-nodes-per-group", 2), "give their number with --groups"),
        ((*day, *two, "--max-moves", 2), "limits changes to a plan in use: give it with --current"),
        (
            (*day, *two, "--current", folder / "of4.json"),
            "for 4 experts on 4 ranks, but the model has",
        ),
        ((*day, *two, "--current", good), "good.csv holds recorded loads and is not a plan"),
        ((*day, *two, "--solver", "linear", "--pin", "0@1"), "--solver linear ignores --pin:"),
        (
            (
                *day,
                *two,
                "--solver",
                "eplb",
                "--groups",
                2,
                "--current",
                folder / "of2.json",
                "--max-moves",
                0,
            ),
            "--solver eplb ignores --max-moves, --groups: leave them out, or plan with",
        ),
        ((*day, *two, "--balance", "activated"), "needs top_k"),
        ((*day, *two, "--seconds", "inf"), "--seconds must be 0 or more and finite, got inf"),
        ((*day, *two, "--top-k", 5), "top_k must be 1 to 4, the number of experts, got 5"),
        ((*day, *two, "--objective", "fan-out"), "needs the choices of single tokens"),
        (
            (*day, *two, "--num-layers", 1),
            "--num-layers must be at least 2, the number of layers of the loads; got 1",
        ),
        (
            (*day, *two, "--dense-layers", "a"),
            "--dense-layers must be numbers and ranges of layers, such as 0-2,5; got 'a'",
        ),
        ((*day, *two, "--dense-layers", "7"), "--dense-layers names layer 7, but"),
        ((*day, *two, "--model", folder / "no"), "neither the folder of a checkpoint"),
        ((*day, *two, "--model", demo_model_folder()), "4 experts, but the model has 32"),
        (cluster("sixties"), f"({folder}/sixties.yaml:2: '1:30')"),
        (cluster("octal"), f"({folder}/octal.yaml:1: '02')"),
        (("show", folder / "of4.json"), "give --trace or --load"),
        (("show", folder / "of4.json", *day, "--heatmap", "x.gif"), "neither *.png nor *.html"),
        (("show", folder / "of4.json", *day, "--json", folder), "it is a folder"),
        (("compare", *day, *two, "--json", folder / "no" / "x"), "is not a folder"),
        (("compare", *day), "give --cluster FILE or --devices N"),
    ]


def test_mistakes_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    for arguments, message in mistakes(tmp_path):
        assert run(*arguments) == 2, arguments
        printed, error = capsys.readouterr()
        assert error.startswith("error: ") and error.count("\n") == 1, (arguments, error)
        assert message in error and not printed, (arguments, error, printed)


def test_progress_without_a_terminal_and_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Without a terminal a line comes from time to time, even before the solver reports; a terminal
    gets a bar."""
    monkeypatch.setattr(place_plan, "_FIRST_LINE_S", 0.01)
    monkeypatch.setattr(place_plan, "_NEXT_LINE_S", 0.01)
    told = Progress(objective=1.02, bound=1.0, done=0.5, seconds=1.0)
    with place_plan._progress("search") as show:
        time.sleep(0.2)
        show(told)
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "search: 0 s, first plan"
    assert lines[-1] == "search: 0 s, 50% done, objective 1.0200, bound 1.0000, gap 2.00%"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(place_plan, "Console", partial(Console, force_terminal=True))
    with place_plan._progress("search") as show:
        show(told)
        time.sleep(0.2)
    assert "objective 1.0200" in capsys.readouterr().err


def test_more_than_can_be_planned_is_one_sentence(tmp_path: Path, capsys: Capture) -> None:
    counts = tmp_path / "counts.csv"
    counts.write_text(("1," * 255 + "1\n") * 61)
    assert run("--load", counts, "--devices", 16384, "--replicas", 32512) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "61 layers of 256 experts" in error and "plan at most 16 layers at a time" in error
