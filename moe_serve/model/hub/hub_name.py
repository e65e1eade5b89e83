"""Names of models on a hub, such as Qwen/Qwen3-30B-A3B@main, and how they differ from folders."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from moe_serve.errors import HubError, shortened

_DEFAULT_REVISION = "main"
_PREFIX = "hf://"  # marks a name where it could also be a folder
_PART = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")
_REVISION = re.compile(r"(?!.*(?:\.\.|//))[A-Za-z0-9_](?:[A-Za-z0-9_./+-]{0,198}[A-Za-z0-9_+-])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHE_PREFIX, _CACHE_SEPARATOR = "models--", "--"


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub, and the branch, tag or commit of its files."""

    repo: str  # OWNER/NAME
    revision: str = _DEFAULT_REVISION

    def __str__(self) -> str:
        return self.repo if self.revision == _DEFAULT_REVISION else f"{self.repo}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a whole commit hash, whose files never change."""
        return is_commit(self.revision)

    @property
    def folder_name(self) -> str:
        """The name of the model's folder in the shared cache."""
        return _CACHE_PREFIX + self.repo.replace("/", _CACHE_SEPARATOR)

    def at(self, commit: str) -> HubName:
        return replace(self, revision=commit)


def is_commit(text: str) -> bool:
    return _COMMIT.fullmatch(text) is not None


def parse_hub_name(text: str) -> HubName:
    """Parses OWNER/NAME[@REVISION], with or without hf:// before it. Raises HubError."""
    found = _parsed(text.removeprefix(_PREFIX))
    if found is None:
        raise HubError(
            f"{shortened(text)!r} is not the name of a model on a hub: it must be OWNER/NAME or "
            "OWNER/NAME@REVISION, of letters, digits and . _ - (a revision may contain /)."
        )
    return found


def hub_name_of(model: str | None) -> HubName | None:
    """Returns the hub name that a MODEL argument gives; None if it gives a folder.

    A folder that exists always wins, and where OWNER is a folder here, OWNER/NAME is a path.
    hf://OWNER/NAME is always a name. Raises HubError for a malformed name after hf://.
    """
    if model is None:
        return None
    if model.startswith(_PREFIX):
        return parse_hub_name(model)
    name = _parsed(model)
    if name is None or os.path.lexists(model) or os.path.isdir(name.repo.partition("/")[0]):
        return None
    return name


def hub_hint(model: str) -> str:
    """Returns advice how to name a model of the hub, if a missing folder looks like such a name;
    otherwise an empty text.
    """
    if _parsed(model) is not None:
        return f", or {_PREFIX}{model} to fetch the model of that name from the hub"
    if _PART.fullmatch(model.partition("@")[0]):
        return f", or OWNER/{model} with the owner of that model to fetch it from the hub"
    return ""


def snapshot_name(folder: Path) -> HubName | None:
    """Returns the name and commit of a folder in the shared cache; None for other folders."""
    repo = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repo.startswith(_CACHE_PREFIX):
        return None
    name = _parsed(repo.removeprefix(_CACHE_PREFIX).replace(_CACHE_SEPARATOR, "/"))
    return None if name is None or not is_commit(folder.name) else name.at(folder.name)


def folder_model_name(folder: Path) -> str:
    """Returns the name of the model in a folder: that of the hub for a folder in the shared cache,
    else the folder's own."""
    found = snapshot_name(folder)
    return folder.name if found is None else found.repo


def _parsed(text: str) -> HubName | None:
    repo, at, revision = text.partition("@")
    parts = repo.split("/")
    if len(parts) != 2 or not all(map(_PART.fullmatch, parts)) or parts[1].endswith(".git"):
        return None
    if not at:
        return HubName(repo)
    return HubName(repo, revision) if _REVISION.fullmatch(revision) else None
