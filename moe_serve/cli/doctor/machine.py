"""Collects facts about this machine, and why each backend is on or off.

It changes no setting, and imports neither triton nor deepspeed: their versions come from the
package metadata.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from moe_serve import __version__
from moe_serve.cli.doctor.machine_limits import Fact, clock, limits, network
from moe_serve.errors import ConfigError

CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
ARM_FLAGS = ("asimd", "sve", "bf16", "i8mm")
CGROUPS = Path("/sys/fs/cgroup")
_PACKAGES = (  # (label, package, extra that installs it)
    ("deepspeed", "deepspeed", "moe-serve[deepspeed]"),
    ("llguidance", "llguidance", "llguidance>=1.9,<2"),
    ("cryptography", "cryptography", "moe-serve[encryption]"),
    ("opentelemetry", "opentelemetry-exporter-otlp-proto-http", "moe-serve[otel]"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One optional part: whether it can be used here, and the reason."""

    name: str
    is_on: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """Facts by section; names that end in _bytes are bytes."""

    sections: Mapping[str, Mapping[str, Fact]]
    backends: tuple[Backend, ...]


def look_at_machine(host: str = "127.0.0.1", port: int = 8000) -> MachineReport:
    """Collects the report. `host` and `port` are the address a server would listen on."""
    sections: dict[str, Mapping[str, Fact]] = {
        "system": _system(),
        "cpu": _cpu(),
        "memory": _memory(),
        "disk": _disk(),
        "limits": limits(),
        "network": network(host, port),
        "clock": clock(),
    }
    try:
        # Only this module of the CLI inspects torch: `doctor` must also run where importing torch
        # fails, and say why.
        import torch
    except (ImportError, OSError) as error:
        reason = f"torch cannot be imported: {error}"
        backends = [Backend(name="torch", is_on=False, reason=reason)]
    else:
        sections["torch"] = _torch_facts(torch)
        backends = [*_cpu_backends(torch), *_cuda_backends(torch), *_collectives(torch)]
    backends += [_package(*package) for package in _PACKAGES]
    return MachineReport(sections=sections, backends=tuple(backends))


def _system() -> dict[str, Fact]:
    return {
        "moe_serve": __version__,
        "os": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
    }


def _cpu() -> dict[str, Fact]:
    info = _read(Path("/proc/cpuinfo"))
    fields = [line.partition(":") for line in info.splitlines()]
    first = {name.strip(): value.strip() for name, _, value in reversed(fields)}
    has = set((first.get("flags") or first.get("Features") or "").split())
    limit = _cgroup_limit("cpu.max")
    return {
        "model": first.get("model name") or platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable_threads": _usable_threads(),
        "cgroup_limit_cores": None if limit is None else round(limit, 2),
        "flags": [flag for flag in (*CPU_FLAGS, *ARM_FLAGS) if flag in has],
    }


def _usable_threads() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory() -> dict[str, Fact]:
    memory = psutil.virtual_memory()
    limit = _cgroup_limit("memory.max")
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "cgroup_limit_bytes": None if limit is None else int(limit),
    }


def _disk() -> dict[str, Fact]:
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "the working folder has been deleted, so its disk cannot be checked: change "
            "into an existing folder."
        ) from None
    usage = shutil.disk_usage(folder)
    return {"folder": str(folder), "total_bytes": usage.total, "free_bytes": usage.free}


def _cgroup_limit(name: str) -> float | None:
    """Returns the smallest limit of this process's control groups, or None without a limit.

    `cpu.max` holds "quota period" and gives cores; `memory.max` holds bytes; "max" is no limit.
    """
    own = [line for line in _read(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::")]
    folder = CGROUPS / own[0][len("0::") :].lstrip("/") if own else CGROUPS
    limits = []
    for place in (folder, *folder.parents):
        quota, _, period = _read(place / name).strip().partition(" ")
        if quota.isdigit():
            limits.append(int(quota) / int(period or 1))
        if place == CGROUPS:
            break
    legacy = _read(CGROUPS / "memory/memory.limit_in_bytes").strip()
    if name == "memory.max" and legacy.isdigit() and int(legacy) < 2**60:
        limits.append(int(legacy))
    return min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _torch_facts(torch: Any) -> dict[str, Fact]:
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "built_for_cuda": torch.version.cuda,
    }


def _cpu_backends(torch: Any) -> list[Backend]:
    has_onednn = bool(torch.backends.mkldnn.is_available())
    is_enabled = has_onednn and torch.backends.mkldnn.enabled is not False
    onednn_reason = "built into this torch" if has_onednn else "this torch was built without it"
    if has_onednn and not is_enabled:
        onednn_reason = "torch.backends.mkldnn.enabled is False"
    has_bf16 = is_enabled and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    bf16_reason = "this CPU supports it" if has_bf16 else "this CPU lacks AVX-512: it is slow"
    return [
        Backend(name="cpu", is_on=True, reason="always there"),
        _native_backend(),
        Backend(name="oneDNN", is_on=is_enabled, reason=onednn_reason),
        Backend(
            name="oneDNN bfloat16",
            is_on=has_bf16,
            reason=bf16_reason if is_enabled else "oneDNN is off",
        ),
    ]


def _native_backend() -> Backend:
    """Checks the compiled kernels, and builds them if necessary, which takes seconds."""
    from moe_kernels.cpu.cpu_library import cache_folder, load_cpu_library

    library = load_cpu_library()
    reason = library.refusal or (
        f"{library.instructions}, float32 and bfloat16, kept in {cache_folder()}"
    )
    return Backend(name="native kernels", is_on=library.refusal is None, reason=reason)


def _cuda_backends(torch: Any) -> list[Backend]:
    devices = _cuda_devices(torch)
    reason = "; ".join(devices) or _why_no_cuda(torch)
    triton = _installed("triton")
    if triton is None:
        triton_reason = "not installed (pip install 'moe-serve[gpu]')"
    elif devices:
        triton_reason = f"{triton} beside torch {torch.__version__}"
    else:
        triton_reason = f"{triton} is installed, but there is no CUDA device"
    return [
        Backend(name="cuda", is_on=bool(devices), reason=reason),
        Backend(name="triton", is_on=triton is not None and bool(devices), reason=triton_reason),
    ]


def _cuda_devices(torch: Any) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `_why_no_cuda` says the same in one sentence
        if not torch.cuda.is_available():
            return []
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        size = f"{device.total_memory / 2**30:.0f} GiB"
        found.append(f"{index}: {device.name}, {size}, capability {device.major}.{device.minor}")
    return found


def _why_no_cuda(torch: Any) -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return "the driver reports no device"


def _collectives(torch: Any) -> list[Backend]:
    distributed = torch.distributed
    if not distributed.is_available():
        reason = "this torch was built without torch.distributed"
        return [Backend(name=name, is_on=False, reason=reason) for name in ("gloo", "nccl")]
    has_gloo = bool(distributed.is_gloo_available())
    has_nccl = bool(distributed.is_nccl_available())
    has_device = bool(_cuda_devices(torch))
    missing = "this torch was built without it"
    nccl_reason = "built into this torch" if has_nccl else missing
    if has_nccl and not has_device:
        nccl_reason = "built into this torch, but there is no CUDA device"
    return [
        Backend(
            name="gloo", is_on=has_gloo, reason="built into this torch" if has_gloo else missing
        ),
        Backend(name="nccl", is_on=has_nccl and has_device, reason=nccl_reason),
    ]


def _package(name: str, package: str, extra: str) -> Backend:
    version = _installed(package)
    reason = f"not installed (pip install '{extra}')" if version is None else version
    return Backend(name=name, is_on=version is not None, reason=reason)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
