"""Checks the names and paths of adapters that clients send."""

from __future__ import annotations

import re
from pathlib import Path

from moe_serve.errors import InvalidRequestError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")


def check_adapter_name(name: str) -> None:
    """Raises InvalidRequestError for a name that could not be a model's."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"lora_name is {name[:200]!r}, but must have 1 to 128 characters, of A-Z, a-z, 0-9 and "
            "._:/@-, and begin with a letter or a digit.",
            param="lora_name",
        )


def folder_below(root: str | None, path: str) -> Path:
    """Returns the folder that a client's path names, which is below `adapters.root`.

    Links are followed first, also those of the files in it. Raises InvalidRequestError.
    """
    if root is None:
        raise InvalidRequestError(
            "This server loads no adapters for clients: adapters.root is not set.",
            param="lora_path",
            code="adapter_root_missing",
        )
    base = Path(root).expanduser().resolve()
    try:
        folder = (base / path).resolve()
        inside = [folder, *(file.resolve() for file in folder.glob("*"))]
    except (OSError, ValueError, RuntimeError):  # a loop of links, a zero byte
        raise _outside(path) from None
    if folder == base or not all(each.is_relative_to(base) for each in inside):
        raise _outside(path)
    return folder


def _outside(path: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"lora_path is {path[:200]!r}, but must be a folder below adapters.root, without links "
        "that lead out of it.",
        param="lora_path",
    )
