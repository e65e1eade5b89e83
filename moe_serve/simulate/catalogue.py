"""Finds the published devices and models of `configs/` by name, and files by path."""

from __future__ import annotations

from pathlib import Path

from moe_serve.errors import ConfigError, shortened

_PACKAGE = Path(__file__).resolve().parents[1]
_CONFIGS = (_PACKAGE.parent / "configs", _PACKAGE / "configs")  # a checkout, an installation


def find_device(text: str) -> Path:
    """Returns the file of a device: a path to a YAML file, or a name such as h100."""
    return _found(text, "devices", ".yaml", "device")


def find_model(text: str) -> Path:
    """Returns a folder with a config.json, a config.json, or the published config of a name such as
    qwen3-235b."""
    return _found(text, "models", ".json", "model")


def _found(text: str, folder: str, suffix: str, what: str) -> Path:
    """Names match without regard to case; the beginning of exactly one is enough."""
    path = Path(text).expanduser()
    if path.exists() and (path.is_dir() or path.suffix == suffix):
        return path
    known = {
        each.stem: each for base in _CONFIGS for each in sorted((base / folder).glob(f"*{suffix}"))
    }
    wanted = text.lower()
    exact = [each for name, each in known.items() if name.lower() == wanted]
    found = exact or [each for name, each in known.items() if name.lower().startswith(wanted)]
    if text and len(found) == 1:
        return found[0]
    names = ", ".join(sorted(each.stem for each in found) if text and found else sorted(known))
    how = "is the beginning of several" if text and found else "is neither a file nor one of"
    raise ConfigError(f"{what} {shortened(text)!r} {how}: {names or 'no file in configs/'}.")
