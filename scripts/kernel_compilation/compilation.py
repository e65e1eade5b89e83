"""Compiles one kernel for one chip without a GPU, and examines it with the tools in triton's
wheel."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from kernel_compilation.facts import (
    GROUPS,
    CompiledFacts,
    count_instructions,
    read_resources,
)
from moe_kernels.gpu.compile_case import CompileCase

WARP_SIZE = 32
_TOOL_TIMEOUT_S = 180
_ALIGNED = [["tt.divisibility", 16]]
# Of PTX from which an instruction comes that is counted. Without these and without a stack there is
# none to find, and for a small kernel the disassembler starts longer than the compiler runs.
_HAS_COUNTED = re.compile(r"mma|cp\.async\.bulk|\.local\b")
_FORMAT = 1  # of CompiledFacts in the cache


def cache_key(case: CompileCase, target: int) -> str:
    """Hashes the kernel's source, the functions it calls, the types, the configuration and
    triton."""
    parts = [
        _FORMAT,
        triton.__version__,
        target,
        case.kernel.cache_key,
        sorted(_signature(case).items()),
        sorted((name, getattr(v, "cache_key", repr(v))) for name, v in case.constexprs.items()),
        sorted(case.divisible_by_16),
        case.num_warps,
        case.num_stages,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def compile_case(case: CompileCase, target: int) -> CompiledFacts:
    """Compiles for `target` (90 for sm_90). Raises what triton raises when it cannot."""
    started = time.perf_counter()
    compiled = triton.compile(
        _source(case), target=GPUTarget("cuda", target, WARP_SIZE), options=_options(case)
    )
    seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        registers, stack = read_resources(_run(triton.knobs.nvidia.cuobjdump, "-res-usage", path))
        counts = dict.fromkeys(GROUPS, 0)
        if stack or _HAS_COUNTED.search(compiled.asm["ptx"]):
            counts = count_instructions(_run(triton.knobs.nvidia.nvdisasm, "-c", "-ndf", path))
    return CompiledFacts(
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        seconds=round(seconds, 2),
        **counts,
    )


def translate_case(case: CompileCase, target: int) -> None:
    """Translates the kernel into Triton's first language, where types, shapes and switches are
    checked, for a tenth of the time of a compilation. Raises what triton raises when it cannot."""
    chip = GPUTarget("cuda", target, WARP_SIZE)
    backend = make_backend(chip)
    options = backend.parse_options(_options(case))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    _source(case).make_ir(chip, options, functions, backend.get_module_map(), context)


def _source(case: CompileCase) -> ASTSource:
    return ASTSource(case.kernel, _signature(case), dict(case.constexprs), _attributes(case))


def _options(case: CompileCase) -> dict[str, int]:
    return {"num_warps": case.num_warps, "num_stages": case.num_stages}


def _signature(case: CompileCase) -> dict[str, str]:
    """Returns every argument in the kernel's order, as triton expects it: constexprs have that
    type."""
    names = case.kernel.arg_names
    known = {**case.signature, **dict.fromkeys(case.constexprs, "constexpr")}
    assert set(names) == set(known), (
        f"{case.name}: the kernel has {sorted(set(names) - set(known))} that the case has not, "
        f"and the case {sorted(set(known) - set(names))}"
    )
    return {name: known[name] for name in names}


def _attributes(case: CompileCase) -> dict[tuple[int, ...], list[list[Any]]]:
    return {
        (i,): _ALIGNED
        for i, name in enumerate(case.kernel.arg_names)
        if case.signature.get(name, "").startswith("*") or name in case.divisible_by_16
    }


def _run(tool: Any, *arguments: str | Path) -> str:
    done = subprocess.run(
        [tool.path, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        timeout=_TOOL_TIMEOUT_S,
    )
    return done.stdout
