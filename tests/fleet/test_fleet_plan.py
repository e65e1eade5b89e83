"""Plans of fleets: certified by simulation, compared, written, and what is refused."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from moe_serve import __version__
from moe_serve.cli.main import main
from moe_serve.fleet.certify import certify
from moe_serve.fleet.demand import demand_of
from moe_serve.fleet.fleet_plan import FleetPlan, plan_fleet
from moe_serve.fleet.fleet_verdict import fleet_verdict
from moe_serve.fleet.offer import Offer, read_fleet
from moe_serve.fleet.packing import Fleet, Group
from moe_serve.planning.calibration_file import write_calibration
from moe_serve.simulate.balancer import ByPromptLength, FewestRequests
from moe_serve.simulate.catalogue import find_model
from moe_serve.simulate.costs.device import HeldOutError
from moe_serve.simulate.costs.model_shape import read_model_shape
from tests.fleet.test_packing import SLO, kinds_of, slots
from tests.support.cluster.calibrations import cpu_calibration

Capture = pytest.CaptureFixture[str]
SHAPE = read_model_shape(find_model("qwen3-30b"), "fp8")
FLEET = ("--fleet", "h100:2@2.50,h20:2@0.90", "--model", "qwen3-30b", "--precision", "fp8")
LOAD = ("--request-rate", "20", "--requests", "20", "--output-tokens", "10", "--certify", "2")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    return int(caught.value.code or 0)


def planned(
    offers: tuple[Offer, ...], rate: float = 10.0, count: int = 20, most: int = 9
) -> FleetPlan:
    wanted = demand_of(slots(count, rate), 0, SLO, 0.9, shares_prefixes=True)
    return plan_fleet(offers, wanted, most, lambda _: None)


def test_a_balancer_takes_turns_by_shares() -> None:
    """Short prompts go to group 0 three times of four, long ones always to group 1 (cells 1, 2)."""
    balancer = ByPromptLength([100, 1000], [[0.75, 0.25], [0.0, 1.0]], [1, 2])
    short = [balancer.cell_of(50, [0, 0, 0]) for _ in range(8)]
    assert short.count(0) == 6 and short.count(1) == 2
    assert [balancer.cell_of(500, [0, 5, 4]), balancer.cell_of(5000, [0, 1, 4])] == [2, 1]
    assert FewestRequests().cell_of(7, [3, 1, 1]) == 1


def test_a_fleet_is_certified_on_the_requests() -> None:
    offers = read_fleet("h100:4@2,h20:4@1", SHAPE, None)
    wanted = demand_of(slots(60), 0, SLO, 0.9, shares_prefixes=True)
    h100, h20 = kinds_of(offers, wanted)
    groups = tuple(
        Group(kind=kind, num_cells=1, shares=shares)
        for kind, shares in ((h100, (0.0, 1.0)), (h20, (1.0, 0.0)))
    )
    done = certify(Fleet(groups=groups), wanted)
    assert done.summary.num_ok == len(wanted.slots) and done.meets
    assert done.fleet.price == 3 and done.device_hours == 2 * done.summary.duration_s / 3600
    hours, tokens = done.summary.duration_s / 3600, done.summary.output_tokens
    assert done.output_cost == pytest.approx(3 * hours / tokens * 1e6)
    assert done.token_cost < done.output_cost
    assert certify(Fleet(groups=groups), wanted) == done, "the same demand gives the same figures"


def test_one_device_is_best_where_it_suffices() -> None:
    offers = read_fleet("h100:2@2.50,h20:2@0.90", SHAPE, None)
    plan = planned(tuple(replace(offer, held_out=None) for offer in offers))
    assert plan.best is not None and plan.best.fleet.num_devices == 1
    assert plan.best.fleet.groups[0].kind.offer.name == "h20", "the cheaper type"
    verdict = fleet_verdict(plan)
    text = " ".join(verdict.sentences)
    assert "disaggregation is not worth it" in text and "a mix of device types is not" in text
    assert verdict.is_split_worth_it is not True and verdict.is_mix_worth_it is not True
    assert "a split into prefill and decode cells is not worth it" in text
    assert verdict.are_roles_worth_it is not True and "the load takes" in text
    assert plan.one_device is not None and verdict.confidence == "unknown"
    prices = [each.fleet.price for each in plan.certified if each.meets]
    assert prices == sorted(prices)


def test_more_cells_for_more_load() -> None:
    low, high = (planned(read_fleet("h20:4@1", SHAPE, None), r, 40, 2) for r in (10.0, 200.0))
    assert low.best is not None and high.best is not None
    assert low.best.fleet.num_devices == 1 < high.best.fleet.num_devices


def test_confidence_compares_the_lead_with_the_held_out_error() -> None:
    offers = read_fleet("h100:1@2.50,h20:1@0.90", SHAPE, None)
    sure, unsure = (
        tuple(replace(o, held_out=HeldOutError(median=m, worst=w, num_rows=9)) for o in offers)
        for m, w in ((0.01, 0.02), (9.0, 99.0))
    )
    assert fleet_verdict(planned(sure, count=10, most=3)).confidence == "high"
    verdict = fleet_verdict(planned(unsure, count=10, most=3))
    assert verdict.confidence == "low" and "off by 900% (median)" in verdict.sentences[-1]


def test_the_command_prints_a_table_a_document_and_a_page(tmp_path: Path, capsys: Capture) -> None:
    page, again = tmp_path / "plan.html", tmp_path / "again.html"
    assert run(*FLEET, *LOAD, "--html", str(page)) == 0
    out = capsys.readouterr().out
    assert "per M out" in out and "the cheapest fleet with 95%" in out
    html = page.read_text("utf-8")
    assert "Cost against latency" in html and "<script" not in html and "<circle" in html
    assert run(*FLEET, *LOAD, "--html", str(again), "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["fleets"][0]["meets"] and first["verdict"]["best"] == first["fleets"][0]["name"]
    assert first["one_device"]["devices"] == 1 and first["searched"]
    assert again.read_text("utf-8") == html, "the same plan, each time"


def test_a_calibration_in_place_of_a_fleet(tmp_path: Path, capsys: Capture) -> None:
    calibration = cpu_calibration()
    machine = replace(
        calibration.machine,
        host=f"{platform.system()} {platform.machine()}",
        moe_serve=__version__,
    )
    path = tmp_path / "here.json"
    write_calibration(replace(calibration, machine=machine), path)
    here = ("--calibration", str(path), "--devices", "3")
    assert run(*here, *LOAD, "--prompt-tokens", "20", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "made-up" and found["fleets"][0]["devices"] == 1


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: Capture) -> None:
    texts = tmp_path / "texts.jsonl"
    row = {"at_s": 1, "prompt": "a text", "output_tokens": 3}
    texts.write_text("\n".join([json.dumps({**row, "at_s": 0}), json.dumps(row)]), "utf-8")
    for arguments, message in (
        ((), "give --calibration FILE and --devices N for a steady batch, or --fleet"),
        (FLEET, "give the load: --trace FILE, or --request-rate R"),
        (LOAD, "give --fleet and --model, or --calibration and --devices"),
        ((*FLEET, *LOAD, "--batch", "4"), "--batch is for a steady batch"),
        ((*FLEET, *LOAD, "--devices", "4"), "--devices and --memory-bytes only apply to"),
        (
            (*FLEET, *LOAD, "--slo", "tpot=1"),
            "--slo must be ttft=500ms,tpot=50ms,e2e=5s",
        ),
        ((*FLEET, *LOAD, "--slo", "tpot=1ms"), "no layout of these devices meets tpot 1 ms: "),
        ((*FLEET, *LOAD, "--prompt-tokens", "50000"), "has 50010 tokens, but Qwen3-30B-A3B takes"),
        ((*FLEET, *LOAD, "--attainment", "2"), "attainment must be in (0, 1), got 2"),
        ((*FLEET, *LOAD, "--html", str(tmp_path / "no" / "a.html")), "its folder does not exist"),
        ((*FLEET, "--trace", str(texts)), "the trace has texts"),
        ((*FLEET[:5], "int3", *LOAD), "precision must be one of auto, bfloat16, fp8; got 'int3'"),
        (("--fleet", "h100:1", "--model", "deepseek-v3", *LOAD), "does not fit the layout"),
    ):
        assert run(*arguments) == 2, arguments
        error = capsys.readouterr().err
        last = error.splitlines()[-1]
        assert message in last and last.startswith("error: ") and "Traceback" not in error, error
