"""Checks output files and folders before work whose result would be lost."""

from __future__ import annotations

from pathlib import Path

from moe_serve.errors import ConfigError


def check_output(*paths: Path | None) -> None:
    """Raises ConfigError if a path is a folder, or lies in a folder that does not exist."""
    for path in paths:
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: {path.parent} is not a folder.")
        if path.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a folder.")


def check_output_folder(path: Path) -> None:
    """Raises ConfigError if an output folder is a file, or lies in a folder that does not exist."""
    refuse_a_file(path)
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: {path.absolute().parent} is not a folder.")


def refuse_a_file(folder: Path) -> None:
    """Raises ConfigError if --out must be a folder but is a file."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"--out {folder} is a file, and files are to be written into a folder: name another, "
            "or remove it."
        )
