"""Cases that are compiled ahead of time: a kernel with the types and configuration it ships in.

A kernel's folder lists its own in `compile_cases.py` as `CASES`; `find_cases` collects them all.
`scripts/compile_kernels.py` compiles them without a GPU.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TARGETS = (80, 90, 100)  # compute capability times ten: A100, H100 and H200, B200


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCase:
    """One kernel in one configuration.

    `kernel` is the @triton.jit function. `signature` gives every argument that is not a
    constexpr its type, in the kernel's order: "*bf16", "i32", "fp32", or
    "tensordesc<bf16[128, 64]>". Pointers are taken to be 16-byte aligned, and the integers named
    in `divisible_by_16` multiples of 16, as the launcher finds them to be at run time; without
    that, loads are not vectorised. An optional pointer that is None belongs into `constexprs`.

    `has_tensor_cores`: the compiled code must contain matrix instructions, whichever the chip
    has. `expects_wgmma`: on sm_90 they must be wgmma, which needs 64 rows in a warp group.
    """

    name: str  # folder and configuration: "grouped_gemm/decode-16x64x128"
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, object] = field(default_factory=dict)
    num_warps: int
    num_stages: int
    targets: tuple[int, ...] = TARGETS
    divisible_by_16: tuple[str, ...] = ()
    has_tensor_cores: bool = False
    expects_wgmma: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.divisible_by_16) - set(self.signature)
        assert not unknown, f"{self.name}: divisible_by_16 names no argument: {sorted(unknown)}"
        both = set(self.signature) & set(self.constexprs)
        assert not both, f"{self.name}: both argument and constexpr: {sorted(both)}"


def find_cases() -> tuple[CompileCase, ...]:
    """Returns the cases of every kernel folder beside this file, sorted by name."""
    found: list[CompileCase] = []
    for folder in pkgutil.iter_modules([str(Path(__file__).parent)]):
        path = Path(__file__).parent / folder.name / "compile_cases.py"
        if path.is_file():
            module = importlib.import_module(f"{__package__}.{folder.name}.compile_cases")
            found.extend(module.CASES)
    twice = [name for name, num in Counter(case.name for case in found).items() if num > 1]
    assert not twice, f"compile cases need names of their own: {twice}"
    return tuple(sorted(found, key=lambda case: case.name))
