"""Lists the models in the shared cache, and removes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from moe_serve.errors import CheckpointError, HubError
from moe_serve.model.hub.hub_name import HubName
from moe_serve.model.hub.hub_settings import HubSettings
from moe_serve.model.hub.repo_files import CONFIG
from moe_serve.model.hub.repo_folder import RepoFolder, size_of

_SHORTEST_COMMIT = 7  # letters of a commit that `remove` accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """One commit of a model in the cache."""

    name: str  # OWNER/NAME
    commit: str
    revisions: tuple[str, ...]  # branches and tags that point at the commit
    num_bytes: int  # of its files, and of unfinished downloads
    last_used: str  # ISO 8601, UTC; of the model's files, whatever their commit
    family: str | None  # that serves it
    is_complete: bool  # all of its files are there
    problem: str | None  # why it cannot be served
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """The commits of a model that were removed, and the bytes that this freed."""

    name: str
    commits: tuple[str, ...]
    num_bytes: int


def cached_models(
    settings: HubSettings, family_of: Callable[[Path], str]
) -> tuple[CachedModel, ...]:
    """Returns the models in the cache, by name. `family_of` names the family of a folder, or raises
    CheckpointError."""
    found = []
    for repo in _repos(settings):
        for revision in repo.revisions:
            found.append(_model(repo, revision, family_of))
    return tuple(sorted(found, key=lambda model: (model.name.lower(), model.commit)))


def remove_model(settings: HubSettings, name: HubName, *, has_revision: bool) -> Removed:
    """Removes one revision of a model (a branch, a tag, a commit or its beginning), or all of them.
    Raises HubError if there is none, or while a download of the model runs."""
    repo = next((repo for repo in _repos(settings) if repo.repo_id == name.repo), None)
    commits = () if repo is None else _commits(repo, name if has_revision else None)
    if repo is None or not commits:
        what = str(name) if has_revision else name.repo
        raise HubError(
            f"{what} is not in the cache {settings.cache}: `moe-serve models` lists what is."
        )
    folder = RepoFolder(Path(repo.repo_path))
    with folder.lock(None):
        before = _bytes_under(folder.root)
        _scan(settings).delete_revisions(*commits).execute()
        for commit in commits:
            folder.forget(commit)
        freed = before - _bytes_under(folder.root)
    return Removed(name=name.repo, commits=commits, num_bytes=freed)


def _repos(settings: HubSettings) -> list[Any]:
    if not settings.cache.is_dir():
        return []
    return [repo for repo in _scan(settings).repos if repo.repo_type == "model"]


def _scan(settings: HubSettings) -> Any:
    """Reads the cache with the hub's own library, which knows the layouts of its other versions."""
    from huggingface_hub import scan_cache_dir

    try:
        return scan_cache_dir(settings.cache)
    except (OSError, ValueError) as error:
        raise HubError(f"the cache {settings.cache} cannot be read: {error}.") from error


def _model(repo: Any, revision: Any, family_of: Callable[[Path], str]) -> CachedModel:
    folder = Path(revision.snapshot_path)
    family, problem = None, None
    missing = RepoFolder(Path(repo.repo_path)).missing_files(revision.commit_hash)
    try:
        family = family_of(folder) if size_of(folder / CONFIG) is not None else None
    except CheckpointError as error:
        problem = f"not served: {str(error).removeprefix(f'{folder}/')}"
    if problem is None and missing:
        problem = f"incomplete: {len(missing)} of its files are missing, such as {missing[0]}"
    partial = sum(size_of(path) or 0 for path in Path(repo.repo_path).glob("blobs/*.incomplete"))
    return CachedModel(
        name=repo.repo_id,
        commit=revision.commit_hash,
        revisions=tuple(sorted(revision.refs)),
        num_bytes=revision.size_on_disk + (partial if missing else 0),
        last_used=_time(repo.last_accessed),
        family=family,
        is_complete=not missing,
        problem=problem,
        folder=str(folder),
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), timezone.utc).isoformat()


def _commits(repo: Any, name: HubName | None) -> tuple[str, ...]:
    """Returns the commits of a name with a revision; without a name, all commits."""
    if name is None:
        return tuple(sorted(revision.commit_hash for revision in repo.revisions))
    wanted = name.revision
    return tuple(
        revision.commit_hash
        for revision in repo.revisions
        if wanted in revision.refs
        or (len(wanted) >= _SHORTEST_COMMIT and revision.commit_hash.startswith(wanted))
    )


def _bytes_under(folder: Path) -> int:
    """Returns the bytes of the files in a folder; links count nothing."""
    return sum(
        path.lstat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
