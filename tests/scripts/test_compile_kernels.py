"""Every Triton kernel compiles for GPUs that are not here, and the code follows the rules."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_compilation import pool, table
from kernel_compilation.cover import broken_rules, covering, quick
from kernel_compilation.facts import CompiledFacts, count_instructions, read_resources
from kernel_compilation.pool import Job
from moe_kernels.gpu.compile_case import CompileCase
from tests.support.sampled_cases import EVERY_CASE

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = "cover" if EVERY_CASE else "quick"
TIMEOUT_S = 600  # a cold cache takes less than a minute on two idle cores
GOOD = CompiledFacts(
    registers=90,
    stack=0,
    shared=98304,
    tensor_memory=0,
    num_mma=0,
    num_wgmma=16,
    num_tcgen05=0,
    num_tma=2,
    num_local=0,
    seconds=0.5,
)
CASE = CompileCase(
    name="gemm/64x64",
    kernel=None,
    signature={"a_ptr": "*bf16", "num_rows": "i32"},
    num_warps=4,
    num_stages=3,
    has_tensor_cores=True,
    expects_wgmma=True,
)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_kernel_compiles_by_the_rules() -> None:
    """Every kernel is compiled, and every switch, size and type of it at least translated (in
    `make test-all` compiled); all combinations would take too long without a cache."""
    done = subprocess.run(
        [sys.executable, "scripts/compile_kernels.py", "--sample", SAMPLE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / x) for x in ("", "kernels"))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_cover_has_everything_once() -> None:
    """3 x 2 tiles and two types for three chips are 36 jobs, of which three have everything but the
    middle size; a kernel without matrices has one chip."""
    cases = {
        f"gemm/{m}x{n}-{kind}": dataclasses.replace(
            CASE,
            name=f"gemm/{m}x{n}-{kind}",
            signature={"a_ptr": kind},
            constexprs={"BLOCK_M": m, "BLOCK_N": n},
        )
        for m, n, kind in itertools.product((16, 64, 128), (32, 64), ("*bf16", "*fp16"))
    }
    cases["scan"] = dataclasses.replace(CASE, name="scan", kernel="another", has_tensor_cores=False)
    jobs = [Job(name, target) for name, case in cases.items() for target in case.targets]
    chosen = covering(cases, jobs)
    assert chosen == covering(cases, jobs), "the same each time"
    tiles = [cases[job.case] for job in chosen if job.case != "scan"]
    assert len(tiles) == 3 and len(chosen) == 4, f"{chosen}"
    assert {job.target for job in chosen if job.case != "scan"} == set(CASE.targets)
    assert {case.signature["a_ptr"] for case in tiles} == {"*bf16", "*fp16"}
    assert {case.constexprs["BLOCK_M"] for case in tiles} >= {16, 128}
    assert {case.constexprs["BLOCK_N"] for case in tiles} == {32, 64}


def test_a_quick_sample_compiles_each_kernel_in_its_largest_size() -> None:
    """A kernel with matrices is compiled for sm_90, and one of them for each other chip; the rest
    of the cover is translated."""
    cases = {
        name: dataclasses.replace(
            CASE, name=name, kernel=sys.intern(name[:4]), constexprs={"BLOCK_M": int(name[5:])}
        )
        for name in ("gemm/16", "gemm/64", "attn/16", "attn/128")
    }
    for name in ("scan/1", "scan/2"):
        cases[name] = dataclasses.replace(
            CASE, name=name, kernel="scan", has_tensor_cores=False, expects_wgmma=False
        )
    jobs = [Job(name, target) for name, case in cases.items() for target in case.targets]
    chosen = quick(cases, jobs)
    compiled = [job for job in chosen if job.is_compiled]
    assert {(job.case, job.target) for job in compiled} == {
        ("attn/128", 90), ("gemm/64", 90), ("gemm/64", 80), ("attn/128", 100), ("scan/1", 80)
    }  # fmt: skip
    everything = {(job.case, job.target) for job in covering(cases, jobs)}
    assert {(job.case, job.target) for job in chosen} >= everything
    assert len(compiled) == 5 and len(chosen) == len(set(chosen)), f"{chosen}"


def test_every_kernel_lists_what_ships() -> None:
    folders = {path.parent for path in (ROOT / "kernels/moe_kernels/gpu").glob("*/*kernel*.py")}
    silent = [folder.name for folder in folders if not (folder / "compile_cases.py").is_file()]
    assert not silent, f"these kernels are never compiled: {silent}"


def test_resources_are_read() -> None:
    usage = " Function mm:\n  REG:48 STACK:8 SHARED:1024 LOCAL:4 CONSTANT[0]:944 TEXTURE:0"
    assert read_resources(usage) == (48, 12)


def test_instructions_are_counted_by_kind() -> None:
    text = """
        /*0040*/              @!P0 STL [R1], R2 ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0070*/              @UP1 UTMALDG.2D [UR8], [UR4] ;
        /*0080*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;
        /*0090*/                   EXIT ;
    """
    assert count_instructions(text) == {
        "num_mma": 1, "num_wgmma": 1, "num_tcgen05": 1, "num_tma": 1, "num_local": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "target", "told"),
    [
        ({"stack": 8}, 80, "8 bytes of stack"),
        ({"num_local": 3}, 100, "3 loads and stores"),
        ({"shared": 163 * 1024 + 1}, 80, "166913 bytes of shared memory, the chip has 166912"),
        ({"shared": 227 * 1024 + 1}, 90, "the chip has 232448"),
        ({"tensor_memory": 513}, 100, "513 columns"),
        ({"num_wgmma": 0, "num_mma": 8}, 90, "no wgmma (8 mma)"),
        ({"num_wgmma": 0}, 80, "no matrix with tensor cores"),
    ],
)
def test_a_broken_rule_is_told(changes: dict[str, int], target: int, told: str) -> None:
    facts = dataclasses.replace(GOOD, **changes)  # type: ignore[arg-type]
    broken = broken_rules(CASE, target, facts)
    assert len(broken) == 1 and told in broken[0], f"{changes} on sm_{target} told: {broken}"
    assert broken_rules(CASE, 90, GOOD) == [], "a case that keeps the rules breaks none"


def test_stale_rows_are_named() -> None:
    cases = {CASE.name: CASE}
    facts = {(CASE.name, target): GOOD for target in CASE.targets}
    rendered = table.render(cases, facts, "3.7.1")
    assert table.stale_rows(rendered, rendered) == []
    assert table.stale_rows("", rendered) == [CASE.name]
    fewer = {key: dataclasses.replace(GOOD, registers=80) for key in facts}
    assert table.stale_rows(table.render(cases, fewer, "3.7.1"), rendered) == [CASE.name]
    other_triton = table.render(cases, fewer, "3.6.0")
    assert table.stale_rows(other_triton, rendered) == [], "figures of another triton may differ"


def test_facts_come_back_from_the_cache(tmp_path: Path) -> None:
    pool.store("key", GOOD, tmp_path)
    assert pool.load("key", tmp_path) == GOOD
    (tmp_path / "old.json").write_text('{"registers": 1}', "utf-8")
    assert pool.load("old", tmp_path) is None, "facts of another version must not be used"
    assert pool.load("missing", tmp_path) is None


def test_a_case_names_its_own_arguments() -> None:
    with pytest.raises(AssertionError, match="num_experts"):
        dataclasses.replace(CASE, divisible_by_16=("num_experts",))
    with pytest.raises(AssertionError, match="a_ptr"):
        dataclasses.replace(CASE, constexprs={"a_ptr": None})
