"""Products of whole numbers have the same bits on every processor, by builds for other
processors."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from moe_kernels.cpu import cpu_library
from moe_kernels.cpu.cpu_library import NativeLibrary
from moe_kernels.cpu.native_linear import NativeLinear
from moe_kernels.reference.torch_kernels import TorchKernels
from tests.support.kernels.kernel_sets import KERNEL_SETS
from tests.support.kernels.quantised_matrices import KINDS

# Each group is compiled at once, so that its headers are read once.
_SOURCES = (
    ("linear.cpp", "panels.cpp", "threads.cpp", "memory.cpp")
    + ("low_bits/pack.cpp", "low_bits/unpack.cpp", "low_bits/few_rows.cpp"),
    ("low_bits/int8_rows.cpp",),  # has other constants of the same names
)
_FUNCTIONS = ("moe_linear_f32", "moe_low_bit_bytes", "moe_pack_low_bits", "moe_advise_huge_pages")
_X86 = platform.machine() in ("x86_64", "AMD64")
# The processor's own code is in test_low_bits.py.
TARGETS = {"AVX2": "-march=x86-64-v3"}

pytestmark = [
    *KERNEL_SETS[1].marks,
    pytest.mark.skipif(not _X86, reason="the other instruction sets are x86's"),
]


def flags_of_processor() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.fixture(scope="module", params=TARGETS)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    """Builds with -O0, which changes no bit and compiles in seconds."""
    if request.param == "AVX2" and not {"avx2", "fma"} <= set(flags_of_processor().split()):
        pytest.skip("this processor has no AVX2")
    compiler = shutil.which("g++")
    assert compiler is not None, "the native kernels were built"
    folder = Path(cpu_library.__file__).parent / "source"
    built = tmp_path_factory.mktemp("built")
    target = built / "kernels.so"
    for index, names in enumerate(_SOURCES):
        includes = "".join(f'#include "{folder / name}"\n' for name in names)
        (built / f"{index}.cpp").write_text(includes)
    flags = ["-O0", TARGETS[request.param], "-std=c++17", "-fPIC", "-pthread", "-w", "-shared"]
    sources = sorted(map(str, built.glob("*.cpp")))
    contraction = ["-ffp-contract=off", "-fno-math-errno"]
    command = [compiler, *flags, *contraction, *sources, "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    found = ctypes.CDLL(str(target))
    signatures = cpu_library._OTHER_SIGNATURES | {
        "moe_linear_f32": cpu_library._SIGNATURES["moe_linear"]
    }
    for name in _FUNCTIONS:
        function = getattr(found, name)
        function.argtypes = signatures[name]
        function.restype = ctypes.c_int64 if name == "moe_low_bit_bytes" else None
    return found


def test_the_bits_of_the_reference(library: ctypes.CDLL) -> None:
    reference = TorchKernels(low_bit_products="int8")
    native = NativeLibrary(library, torch.float32, 1, "int8")
    for kind in KINDS:
        if not kind.form.can_quantise_rows:
            continue
        for n, k in ((64, 256), (40, 96)):
            matrix, x_TK = kind.matrix(n, k), torch.randn(7, k)
            wanted = reference.linear(matrix)(x_TK)
            for num_rows in (1, 2, 3, 7):
                found = NativeLinear(native, matrix, None)(x_TK[:num_rows].contiguous())
                assert torch.equal(found, wanted[:num_rows]), f"{kind.name}, {n} x {k}, {num_rows}"


def test_exact_products(library: ctypes.CDLL) -> None:
    """Unpacked values do not depend on the processor. Sums of fp32 only agree on one processor."""
    native = NativeLibrary(library, torch.float32, 1)
    identity = torch.eye(96)
    for kind in KINDS:
        matrix = kind.matrix(40, 96)
        found = NativeLinear(native, matrix, None)(identity)
        assert torch.equal(found, matrix.dequantised(torch.float32).t()), kind.name
