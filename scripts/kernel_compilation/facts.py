"""The compiler's result for one kernel in one configuration for one chip."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

# Instructions of the disassembly, by what they say about a kernel. On sm_80 matrices are multiplied
# by HMMA (IMMA, QMMA for 8 bits), on sm_90 by HGMMA too (wgmma), on sm_100 by UTCHMMA (tcgen05).
GROUPS = {
    "num_mma": re.compile(r"[HIQ]MMA\b"),
    "num_wgmma": re.compile(r"[HIQ]GMMA\b"),
    "num_tcgen05": re.compile(r"UTC[HIQO]MMA\b"),
    "num_tma": re.compile(r"UTMA(LDG|STG)\b"),
    "num_local": re.compile(r"(LDL|STL)\b"),
}
_INSTRUCTION = re.compile(r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9]+)", re.M)
_RESOURCE = re.compile(r"\b(REG|STACK|LOCAL):(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFacts:
    """The facts of one compilation.

    Sizes are in bytes, except for registers (per thread) and tensor memory (columns). `num_*` are
    counts of instructions; `num_local` counts loads and stores of spilled registers.
    """

    registers: int
    stack: int
    shared: int
    tensor_memory: int
    num_mma: int
    num_wgmma: int
    num_tcgen05: int
    num_tma: int
    num_local: int
    seconds: float

    @property
    def num_matrix(self) -> int:
        """The number of matrix instructions of any kind."""
        return self.num_mma + self.num_wgmma + self.num_tcgen05


def read_resources(usage: str) -> tuple[int, int]:
    """Reads the registers per thread, and stack plus local bytes, from `cuobjdump -res-usage`."""
    found = {name: int(value) for name, value in _RESOURCE.findall(usage)}
    assert "REG" in found and "STACK" in found, f"cuobjdump prints something else now: {usage!r}"
    return found["REG"], found["STACK"] + found.get("LOCAL", 0)


def count_instructions(disassembly: str) -> dict[str, int]:
    """Counts the instructions of each of GROUPS in the output of `nvdisasm -c`."""
    opcodes = Counter(_INSTRUCTION.findall(disassembly))
    assert opcodes["EXIT"] > 0, f"nvdisasm prints something else now: {disassembly[:200]!r}"
    return {
        name: sum(num for opcode, num in opcodes.items() if pattern.fullmatch(opcode))
        for name, pattern in GROUPS.items()
    }
