"""The compiled kernels are cached, rebuilt when the source changes, and never required."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_kernels import kernel_choice
from moe_kernels.cpu import cpu_library
from moe_kernels.cpu.native_kernels import NativeKernels
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation
from moe_kernels.interface.routing import RouterShape
from moe_kernels.kernel_choice import choose_kernels
from tests.support.kernels.kernel_sets import KERNEL_SETS

CPU = torch.device("cpu")
needs_native = KERNEL_SETS[1].marks[0]  # type: ignore[union-attr]


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Gives an empty cache folder and forgets earlier loads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_library.load_cpu_library.cache_clear()
    yield
    cpu_library.load_cpu_library.cache_clear()


@pytest.mark.usefixtures("_fresh")
def test_without_a_compiler_torch_serves_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    kernels = choose_kernels(CPU, torch.float32)
    assert kernels.name.startswith("torch (")
    assert "no C++ compiler was found" in kernels.name
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler was found"):
        choose_kernels(CPU, torch.float32, "native")


@pytest.mark.usefixtures("_fresh")
def test_a_compiler_that_fails_is_no_disaster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'cannot find this or that' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    library = cpu_library.load_cpu_library()
    assert library.library is None
    assert "could not build them" in (library.refusal or "")


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("left", [b"", b"\x7fELF of which a half is lost"], ids=["none", "half"])
def test_a_kept_build_that_is_not_whole_is_built_again(tmp_path: Path, left: bytes) -> None:
    compiler = tmp_path / "g++"  # makes a file of whatever it is asked for
    compiler.write_text(
        "#!/bin/sh\n"
        'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo built > "$2"; fi; shift; done\n'
    )
    compiler.chmod(0o755)
    built = cpu_library._build(str(compiler))
    whole, stamp = built.read_bytes(), built.stat().st_mtime_ns
    assert cpu_library._build(str(compiler)) == built
    assert built.stat().st_mtime_ns == stamp, "it was whole, and is used again"
    built.write_bytes(left)
    assert cpu_library._build(str(compiler)) == built
    assert built.read_bytes() == whole


@pytest.mark.usefixtures("_fresh")
def test_a_cache_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/true")
    refusal = cpu_library.load_cpu_library().refusal or ""
    assert f"{tmp_path}/file/moe-serve cannot be written (Not a directory)" in refusal
    assert refusal.endswith("set XDG_CACHE_HOME to a writable folder")


@pytest.mark.usefixtures("_fresh")
def test_a_build_says_that_it_is_under_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        "#!/bin/sh\nsleep 0.05\n"
        'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo built > "$2"; fi; shift; done\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(cpu_library, "_PROGRESS_S", 0.01)
    with caplog.at_level("INFO", "moe_kernels.build"):
        built = cpu_library._build(str(compiler))
        cpu_library._build(str(compiler))  # it is kept, and nothing more is said
    first, *between, last = [record.getMessage() for record in caplog.records]
    count = len(list((Path(cpu_library.__file__).parent / "source").rglob("*.cpp")))
    assert first == f"building the CPU kernels for this processor, once: {count} files"
    told = r"building the CPU kernels, once: \d+ s"
    assert between and all(re.fullmatch(told, line) for line in between), between
    assert re.fullmatch(rf"the CPU kernels are built after \d+ s: {re.escape(str(built))}", last)


@needs_native
def test_the_name_says_which_instructions_the_kernels_use() -> None:
    flags = Path("/proc/cpuinfo").read_text("utf-8") if Path("/proc/cpuinfo").exists() else ""
    library = cpu_library.load_cpu_library()
    assert library.instructions
    for flag, name in (("avx512_bf16", "AVX512-BF16"), ("avx512vl", "AVX-512"), ("avx2", "AVX2")):
        if f" {flag}" in flags:
            assert library.instructions == name
            break
    kernels = choose_kernels(CPU, torch.bfloat16, "native")
    assert kernels.name == f"native C++ (bf16, {library.instructions})"


@pytest.mark.parametrize(
    ("capability", "machine", "words"),
    [
        ("AVX2", "x86_64", "AVX2"),
        ("AVX512", "x86_64", "AVX-512"),
        ("DEFAULT", "aarch64", "NEON"),
        ("DEFAULT", "x86_64", "no vector instructions"),
    ],
)
def test_torch_says_it_too(
    monkeypatch: pytest.MonkeyPatch, capability: str, machine: str, words: str
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert f"linears, {words}" in choose_kernels(CPU, torch.float32, "torch").name


@needs_native
def test_a_build_is_kept_and_used_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The compiler takes seconds, so another one copies the library that it has made for all
    tests."""
    made = cpu_library.load_cpu_library().library
    assert made is not None
    request.getfixturevalue("_fresh")
    compiler = tmp_path / "g++"
    compiler.write_text(
        "#!/bin/sh\nwhile [ $# -gt 0 ]; do "
        f'if [ "$1" = -o ]; then cp \'{made._name}\' "$2"; fi; shift; done\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert cpu_library.load_cpu_library().refusal is None
    (built,) = cpu_library.cache_folder().glob("cpu-kernels-*.so")
    stamp = built.stat().st_mtime_ns
    cpu_library.load_cpu_library.cache_clear()
    assert cpu_library.load_cpu_library().refusal is None
    assert [p.stat().st_mtime_ns for p in cpu_library.cache_folder().iterdir()] == [stamp]
    assert kernel_choice.native_refusal(CPU, torch.bfloat16) is None


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_threads_does_not_change_a_bit(dtype: torch.dtype) -> None:
    library = cpu_library.load_cpu_library().library
    assert library is not None
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    weight, x = random(300, 256), random(150, 256)
    experts = [ExpertWeights(random(96, 256), random(96, 256), random(256, 96)) for _ in range(8)]
    shape = RouterShape(num_experts=8, top_k=2, is_renormalised=True)
    results = []
    for threads in (1, 2, 3, 4):
        kernels = NativeKernels(library, dtype, threads)
        logits = kernels.router_linear(weight[:8])(x)
        ids, weights = kernels.route(logits, shape, None)
        results.append(
            (
                kernels.linear(weight)(x),
                kernels.rms_norm(x, weight[0, :256].contiguous(), 1e-6),
                kernels.head_linear(weight[None, :, :128])(x[:, None, :128]),
                logits,
                weights,
                kernels.experts(experts, GatedActivation())(x, ids, weights),
            )
        )
    for threads, result in enumerate(results[1:], start=2):
        for one, other in zip(results[0], result, strict=True):
            assert torch.equal(one, other), f"{threads=}"
