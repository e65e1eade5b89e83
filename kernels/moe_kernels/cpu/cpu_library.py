"""The compiled CPU kernels, which are built once with the installed C++ compiler and then cached.

No torch headers and no build system: a few plain C++ files, called through ctypes, which takes
seconds to compile. Where there is no compiler (or it fails), `load` says why and the torch kernels
serve instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_kernels.interface.quantised_matrix import LowBitProducts

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-pthread")
_MATH_FLAGS = ("-ffp-contract=fast", "-fno-math-errno")
_BUILD_TIMEOUT_S = 400  # for one file, which takes 10 to 30 on a machine that is not busy
_PROGRESS_S = 3.0
_LOGGER = logging.getLogger("moe_kernels.build")
_DIGEST_BYTES = hashlib.sha256().digest_size

_POINTER, _INT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
# Arguments of the functions that there are for each dtype ...
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "moe_pack": (_POINTER, *[_INT] * 4, _POINTER, *[_INT] * 3),
    "moe_linear": (*[_POINTER] * 2, _INT, *[_POINTER] * 2, _INT),
    "moe_head_linear": (*[_POINTER] * 2, *[_INT] * 2, _POINTER, _INT),
    "moe_router_linear": (*[_POINTER] * 2, _INT, _POINTER, _INT),
    "moe_experts": (*[_POINTER] * 5, *[_INT] * 2, _POINTER, *[_INT] * 2),
    "moe_experts_partial": (*[_POINTER] * 5, *[_INT] * 2, _POINTER, *[_INT] * 2),
    "moe_mlp_hidden": (*[_POINTER] * 3, _INT, _POINTER),
    "moe_mlp_down": (*[_POINTER] * 4, _INT, _POINTER),
    "moe_rms_norm": (_POINTER, _INT, *[_POINTER] * 2, *[_INT] * 2, _REAL, _INT),
    "moe_attend": (_POINTER,) * 12,
    "moe_front": (*[_POINTER] * 10, _INT, _POINTER, _INT),
    "moe_stack": (_POINTER, _POINTER),
    "moe_turn": (_POINTER,),
    "moe_turn_step": (_POINTER,),
    "moe_service_step": (_POINTER,),
    "moe_service": (_POINTER, _POINTER),
    "moe_draft": (*[_POINTER] * 4, *[_INT] * 2, _REAL),
    "moe_add": (*[_POINTER] * 4, *[_INT] * 2),
    "moe_add_signs": (*[_POINTER] * 2, _INT, _POINTER, *[_INT] * 2),
    "moe_low_rank": (_POINTER, *[_INT] * 2, _POINTER, _INT, _POINTER, _INT),
    "moe_row_signs": (_POINTER, *[_INT] * 2, _POINTER, _INT, _POINTER, _INT),
    "moe_row_heads": (_POINTER, *[_INT] * 2, _POINTER, *[_INT] * 2, _POINTER),
    "moe_row_norms": (_POINTER, *[_INT] * 2, _POINTER, _INT, _POINTER, _INT, _REAL, _INT),
    "moe_row_routes": (_POINTER, _INT, *[_POINTER] * 2, *[_INT] * 3, *[_POINTER] * 2),
    "moe_attend_latent": (
        *[_POINTER] * 2, *[_INT] * 2, _POINTER, *[_INT] * 2, _POINTER, _INT, *[_POINTER] * 7,
    ),
}  # fmt: skip
# ... and of those that there is one of.
_OTHER_SIGNATURES: dict[str, tuple[type, ...]] = {
    "moe_route": (*[_POINTER] * 5, _INT),
    "moe_row_attended": (_POINTER, _INT, *[_POINTER] * 4, _INT),
    "moe_largest": (*[_POINTER] * 3, *[_INT] * 3),
    "moe_advise_huge_pages": (_POINTER, _INT),
    "moe_low_bit_bytes": (_POINTER, *[_INT] * 2),
    "moe_pack_low_bits": (*[_POINTER] * 3, *[_INT] * 3),
    "moe_instruction_set": (),
}
# functions that return a number
_COUNTING = (
    "moe_experts", "moe_stack", "moe_turn", "moe_service", "moe_low_bit_bytes", "moe_row_attended",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """The loaded library and its instruction set, or the reason why it could not be loaded."""

    library: ctypes.CDLL | None
    refusal: str | None
    instructions: str = ""  # AVX512-BF16, AVX-512, AVX2, NEON, ...
    build: str = ""  # digest of source, compiler, flags and processor


@functools.lru_cache(maxsize=1)
def load_cpu_library() -> CpuLibrary:
    """Builds the library if needed and loads it; the outcome is the same for the life of the
    process."""
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")
    if compiler is None:
        return CpuLibrary(None, "no C++ compiler was found (install g++ for faster CPU kernels)")
    try:
        path = _build(compiler)
        library = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return CpuLibrary(None, f"{compiler} could not build them: {_last_line(error)}")
    _declare(library)
    return CpuLibrary(library, None, instruction_set(library), path.stem)


def instruction_set(library: ctypes.CDLL) -> str:
    """Returns the vector instructions that a loaded library is built for."""
    name: bytes = library.moe_instruction_set()
    return name.decode("ascii")


def _declare(library: ctypes.CDLL) -> None:
    signatures = dict(_OTHER_SIGNATURES)
    for name, arguments in _SIGNATURES.items():
        signatures |= {f"{name}_bf16": arguments, f"{name}_f32": arguments}
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = _INT if name.startswith(_COUNTING) else None
    library.moe_instruction_set.restype = ctypes.c_char_p


def cache_folder() -> Path:
    """Returns the folder of built libraries in the user's cache; only the user can read it."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "moe-serve"


def _build(compiler: str) -> Path:
    """Returns the library for this source, compiler and processor. Builds it if it is not in the
    cache."""
    folder = Path(__file__).parent / "source"
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".cpp", ".h"))
    sources = [path for path in files if path.suffix == ".cpp"]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=20)
    digest.update(version.stdout)
    digest.update(" ".join((*_FLAGS, *_MATH_FLAGS, _processor())).encode())
    target = cache_folder() / f"cpu-kernels-{digest.hexdigest()[:24]}.so"
    if target.exists() and target.stat().st_uid == os.getuid() and _is_whole(target):
        return target
    begin = time.monotonic()
    with _work_folder(target.parent) as work, _told_progress(len(sources)):
        objects = [Path(work) / f"{path.stem}.o" for path in sources]
        commands = [
            [compiler, *_FLAGS, *_math_flags(path), "-c", str(path), "-o", str(built)]
            for path, built in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            list(pool.map(_run, commands))
        library = Path(work) / "kernels.so"
        _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library)])
        with library.open("ab") as file:  # behind what the loader reads
            file.write(hashlib.sha256(library.read_bytes()).digest())
        library.replace(target)  # atomic: two processes may build at once
    _LOGGER.info("the CPU kernels are built after %.0f s: %s", time.monotonic() - begin, target)
    return target


def _math_flags(path: Path) -> tuple[str, ...]:
    """Returns the compiler's flags: products with quantised rows use no fused operations, so that
    they have the same bits on every processor."""
    return (*_MATH_FLAGS, "-ffp-contract=off") if path.name == "int8_rows.cpp" else _MATH_FLAGS


@contextlib.contextmanager
def _told_progress(num_files: int) -> Iterator[None]:
    """Reports that a build is in progress, at once and every few seconds until it ends."""
    done, begin = threading.Event(), time.monotonic()
    _LOGGER.info("building the CPU kernels for this processor, once: %d files", num_files)

    def tell() -> None:
        while not done.wait(_PROGRESS_S):
            _LOGGER.info("building the CPU kernels, once: %.0f s", time.monotonic() - begin)

    teller = threading.Thread(target=tell, name="kernel build progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _is_whole(path: Path) -> bool:
    """Checks that a kept library is unchanged: it ends with its digest. A full disk or a loss of
    power may leave a part of it, which would not load, or would end the process that loads it."""
    content = path.read_bytes()
    return content[-_DIGEST_BYTES:] == hashlib.sha256(content[:-_DIGEST_BYTES]).digest()


def _work_folder(cache: Path) -> tempfile.TemporaryDirectory[str]:
    """Makes a temporary folder in the cache, so that a finished build can be moved within it."""
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        return tempfile.TemporaryDirectory(dir=cache)
    except OSError as error:
        raise RuntimeError(
            f"{cache} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a writable folder"
        ) from error


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, check=True, timeout=_BUILD_TIMEOUT_S, text=True)


def _processor() -> str:
    """Returns a description of the CPU with everything that -march=native may depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    keys = ("vendor_id", "model name", "flags", "Features")
    return "\n".join(next((x for x in lines if x.startswith(k)), "") for k in keys)


def _last_line(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"one file took longer than {error.timeout:.0f} s (is the machine busy?)"
    stderr = getattr(error, "stderr", None)
    text = str(stderr or error).strip()
    return text.splitlines()[-1] if text else type(error).__name__


SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_PANEL = 16  # columns of a panel, see cpu/panels.h
_UNIT_BYTES = 4

Pointer, Int, Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def num_panels(num_columns: int) -> int:
    return -(-num_columns // _PANEL)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The functions of the library. `threads` is the number that every call may use."""

    library: ctypes.CDLL
    dtype: torch.dtype
    threads: int
    low_bit_products: LowBitProducts = "exact"

    def function(self, name: str) -> ctypes._NamedFuncPointer:
        """Returns the library's function for this dtype."""
        found: ctypes._NamedFuncPointer = getattr(self.library, f"{name}_{SUFFIXES[self.dtype]}")
        return found

    def packed_size(self, panels: int, width: int, dtype: torch.dtype | None = None) -> int:
        """Returns the 32-bit units of a packed matrix."""
        per_unit = _UNIT_BYTES // (dtype or self.dtype).itemsize
        return panels * _PANEL * -(-width // per_unit)

    def empty_packed(self, *sizes: int) -> Tensor:
        """Returns fresh memory of 32-bit units, in huge pages if the system has some."""
        tensor = torch.empty(sizes, dtype=torch.int32)
        self.library.moe_advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def pack(
        self, weight_NK: Tensor, packed: Tensor, panels: int, first: int = 0, stride: int = 1
    ) -> None:
        """Puts a matrix (any strides: it may be a view of a mapped file) into every `stride`-th
        panel from `first` on of a packed matrix of `panels`."""
        name = f"moe_pack_{SUFFIXES[weight_NK.dtype]}"
        rows, width = weight_NK.shape
        assert packed.is_contiguous() and packed.numel() == self.packed_size(
            panels, width, weight_NK.dtype
        ), f"packed memory of {packed.numel()} units for {panels} panels of {width}"
        getattr(self.library, name)(
            weight_NK.data_ptr(), *weight_NK.stride(), rows, width,
            packed.data_ptr(), first, stride, panels,
        )  # fmt: skip
