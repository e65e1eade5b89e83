"""Describes the machine in reports, and sets up the environments of child processes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGES = ("moe-serve", "torch", "transformers", "safetensors")


def describe_environment() -> dict[str, str]:
    """Returns CPU, cores, Python and package versions; "absent" for packages that are not
    installed.
    """
    return {
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def write_report(path: Path | None, report: Mapping[str, Any]) -> None:
    """Writes the report of a benchmark and its machine as JSON; does nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"environment": describe_environment(), **report}
        path.write_text(json.dumps(whole, indent=1, default=str) + "\n", encoding="utf-8")


def child_environment(num_threads: int | None = None) -> dict[str, str]:
    """Returns the environment of a process that imports moe_serve; all libraries use as many
    threads.
    """
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    return os.environ | _threads(num_threads) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def worker_environment(num_threads: int, *, is_own: bool) -> dict[str, str]:
    """Returns the environment of a peer's interpreter, which sees only its own packages."""
    if is_own:
        return child_environment(num_threads)
    environment = os.environ | _threads(num_threads)
    environment.pop("PYTHONPATH", None)
    return environment


def _threads(num_threads: int | None) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if num_threads else ()
    return dict.fromkeys(names, str(num_threads))


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
