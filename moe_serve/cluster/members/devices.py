"""Chooses the accelerator that a rank's worker may see."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moe_serve.errors import ConfigError

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/dev/nvidiactl")


def visible_device(
    environ: Mapping[str, str], place: int, device: int | None, *, has_accelerators: bool
) -> str | None:
    """Returns the value of CUDA_VISIBLE_DEVICES for one rank; None leaves the variable as it is.

    A launcher may have narrowed what the node sees (Slurm: CUDA_VISIBLE_DEVICES=4,5). Then `device`
    and `place` are indices into that list. Raises ConfigError.
    """
    wanted = place if device is None else device
    given = environ.get(DEVICES_VARIABLE)
    if given is None:
        return str(wanted) if has_accelerators or device is not None else None
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names and device is None:
        return None  # hidden on purpose
    if wanted >= len(names):
        raise ConfigError(
            f"a rank needs device {wanted} of its node, but {DEVICES_VARIABLE}={given} shows "
            f"only {len(names)}."
        )
    return names[wanted]


def shared_device(environ: Mapping[str, str], place: int, num_devices: int) -> str | None:
    """Like `visible_device`, for ranks of one host that take its devices in turn and may share
    them."""
    given = environ.get(DEVICES_VARIABLE)
    names = [str(number) for number in range(num_devices)]
    if given is not None:
        names = [name.strip() for name in given.split(",") if name.strip()]
    return names[place % len(names)] if names else None


def num_accelerators() -> int:
    """Returns the number of NVIDIA GPUs of this host or container, without loading a library."""
    return sum(path.name[len("nvidia") :].isdigit() for path in _DRIVER.parent.glob("nvidia*"))


def has_accelerators() -> bool:
    """Returns True if the NVIDIA driver is loaded. Asking a library would take seconds."""
    return _DRIVER.exists()
