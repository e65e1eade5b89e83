"""A file or folder that a command is to write: checked before the work that would be lost."""

from __future__ import annotations

from pathlib import Path

from moe_serve.errors import ConfigError


def check_output(*paths: Path | None) -> None:
    """Raises ConfigError where a path has no folder to lie in, or is one."""
    for path in paths:
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: {path.parent} is no folder.")
        if path.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a folder.")


def check_output_folder(path: Path) -> None:
    """Raises ConfigError where a folder of files would lie in no folder, or is a file."""
    refuse_a_file(path)
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: {path.absolute().parent} is no folder.")


def refuse_a_file(folder: Path) -> None:
    """Raises ConfigError where --out is to be a folder."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"--out {folder} is a file, and files are to be written into a folder: name another, "
            "or remove it."
        )
