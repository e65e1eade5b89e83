"""Measures the memory that this process may still take, within its container's limits."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # version 1 writes a number near 2**63 for "no limit"
_V2 = ("memory.max", "memory.current", "inactive_file ")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")


def free_bytes(device: torch.device) -> int:
    """Returns free bytes: on a GPU as its driver reports; in host memory also within control group
    limits."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # torch still holds memory that loading has freed
        return int(torch.cuda.mem_get_info(device)[0])
    return min([int(psutil.virtual_memory().available), *_left_in_groups()])


def _left_in_groups() -> list[int]:
    """Returns the free bytes of each control group with a limit. Cached files count as free."""
    found = []
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        folder, names = root / path.lstrip("/"), _V1 if controllers else _V2
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            found.append(_left_in(place, *names))
    return [left for left in found if left is not None]


def _left_in(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
    if not (most.isdecimal() and used.isdecimal()) or int(most) >= _NO_LIMIT:
        return None
    lines = _text(folder / "memory.stat").splitlines()
    files = sum(int(line.removeprefix(cached)) for line in lines if line.startswith(cached))
    return max(0, int(most) - max(0, int(used) - files))


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
