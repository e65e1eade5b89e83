"""Renders the table of docs/reference/kernel-coverage.md: kernel configurations by chip."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kernel_compilation.facts import CompiledFacts
from moe_kernels.gpu.compile_case import TARGETS, CompileCase
from tables.page_block import PageBlock

BLOCK = PageBlock(
    page=Path(__file__).resolve().parents[2] / "docs" / "reference" / "kernel-coverage.md",
    start="<!-- compile-table: start -->",
    end="<!-- compile-table: end -->",
)
Facts = Mapping[tuple[str, int], CompiledFacts]


def render(cases: Mapping[str, CompileCase], facts: Facts, triton_version: str) -> str:
    """Renders the table. Stack and spills are shown if there are any; cases that did not compile
    have no facts.
    """
    num_spilling = sum(found.stack > 0 or found.num_local > 0 for found in facts.values())
    spilling = f"{num_spilling} with" if num_spilling else "none with"
    lines = [
        f"Triton {triton_version}; {len(facts)} compilations, {spilling} stack or spills.",
        "",
        "| kernel and configuration | warps x stages | "
        + " | ".join(f"sm_{target}" for target in TARGETS)
        + " |",
        "|---|---|" + "---|" * len(TARGETS),
    ]
    for name, case in sorted(cases.items()):
        cells = [_cell(facts.get((name, target))) for target in TARGETS]
        lines.append(f"| `{name}` | {case.num_warps} x {case.num_stages} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(facts: CompiledFacts | None) -> str:
    """Returns registers, shared memory in KiB, and the matrix and copy instructions as text."""
    if facts is None:
        return ""
    kinds = {
        "mma": facts.num_mma,
        "wgmma": facts.num_wgmma,
        "tcgen05": facts.num_tcgen05,
        "TMA": facts.num_tma,
    }
    parts = [f"{facts.registers} regs", f"{facts.shared / 1024:.3g} KB"]
    parts += [f"{kind} x{num}" for kind, num in kinds.items() if num > 0]
    parts += [f"**{facts.stack} B of stack**"] if facts.stack else []
    return ", ".join(parts)


def stale_rows(shown: str, rendered: str) -> list[str]:
    """Returns rows of `rendered` that the page lacks or shows differently, and superfluous rows of
    the page.

    Figures are compared only where the page was made with the same triton.
    """
    is_same_triton = shown.split(";")[0] == rendered.split(";")[0]
    old, new = _rows(shown), _rows(rendered)
    changed = [name for name in new if name in old and new[name] != old[name]]
    return sorted((old.keys() ^ new.keys()) | set(changed if is_same_triton else ()))


def _rows(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: line for line in lines}
