"""A model's folder in the shared cache, in the layout that all tools for the hub share.

    models--OWNER--NAME/refs/main            the commit of a branch or tag
    models--OWNER--NAME/blobs/DIGEST         the content of a file
    models--OWNER--NAME/snapshots/COMMIT/    links to blobs, under the files' names
    models--OWNER--NAME/moe-serve/COMMIT.json   our own: the files of a whole snapshot

A blob gets its name only when its content is complete and its hash is right.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_serve.errors import HubError
from moe_serve.json_text import parse_json
from moe_serve.model.hub.hub_name import HubName, is_commit
from moe_serve.model.hub.repo_files import CONFIG, INDEX, TOKENIZER, WEIGHTS, RepoFile

PARTIAL = ".moe-serve.incomplete"


@dataclass(frozen=True, slots=True)
class RepoFolder:
    """The paths of one model in the cache. Nothing is created before it is written."""

    root: Path

    @classmethod
    def of(cls, cache: Path, name: HubName) -> RepoFolder:
        return cls(cache / name.folder_name)

    def snapshot(self, commit: str) -> Path:
        return self.root / "snapshots" / commit

    def blob(self, file: RepoFile) -> Path:
        return self.root / "blobs" / file.digest

    def partial(self, file: RepoFile) -> Path:
        """Returns the bytes of a file received so far."""
        return self.root / "blobs" / (file.digest + PARTIAL)

    def missing_bytes(self, file: RepoFile) -> int:
        """Returns how many bytes are still to be received."""
        if size_of(self.blob(file)) == file.size:
            return 0
        return max(0, file.size - (size_of(self.partial(file)) or 0))

    def link(self, name: str, digest: str, commit: str) -> None:
        """Shows a blob under a file's name in the snapshot. Raises OSError."""
        pointer = self.snapshot(commit) / name
        pointer.parent.mkdir(parents=True, exist_ok=True)
        aside = pointer.with_name(f".{name}.{os.getpid()}")
        aside.unlink(missing_ok=True)
        aside.symlink_to(Path("..", "..", "blobs", digest))
        aside.replace(pointer)

    def commit_of(self, revision: str) -> str | None:
        """Returns the commit of a revision as of the last complete download."""
        if is_commit(revision):
            return revision
        try:
            commit = (self.root / "refs" / revision).read_text("ascii").strip()
        except (OSError, ValueError):
            return None
        return commit if is_commit(commit) else None

    def set_commit(self, revision: str, commit: str) -> None:
        """Notes the commit of a branch or tag. Raises OSError."""
        if not is_commit(revision) and self.commit_of(revision) != commit:
            _write(self.root / "refs" / revision, commit)

    def note_files(self, commit: str, files: Iterable[RepoFile]) -> None:
        """Notes the files of a whole snapshot before they are received. Raises OSError."""
        sizes = {file.name: file.size for file in files}
        _write(self._note(commit), json.dumps({"files": sizes}, indent=1))

    def noted_files(self, commit: str) -> Mapping[str, int] | None:
        """Returns {file name: bytes} of a whole snapshot; None if another tool fetched it."""
        try:
            files = parse_json(self._note(commit).read_text("utf-8"))["files"]
            return {str(name): int(size) for name, size in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def forget(self, commit: str) -> None:
        self._note(commit).unlink(missing_ok=True)

    def missing_files(self, commit: str) -> list[str]:
        """Returns the files that a snapshot lacks; empty if it can be served.

        Of a snapshot that another tool fetched only the necessary files are known.
        """
        folder = self.snapshot(commit)
        noted = self.noted_files(commit)
        if noted is not None:
            return [name for name, size in noted.items() if size_of(folder / name) != size]
        missing = [name for name in (CONFIG, TOKENIZER) if size_of(folder / name) is None]
        shards = indexed_files(folder)
        if shards is not None:
            return missing + sorted(name for name in shards if size_of(folder / name) is None)
        has_weights = any(size_of(path) for path in folder.glob(f"*{WEIGHTS}"))
        return missing if has_weights else [*missing, f"*{WEIGHTS}"]

    @contextlib.contextmanager
    def lock(self, on_wait: Callable[[], None] | None) -> Iterator[None]:
        """Holds the model's lock, so that only one process of the host downloads or removes the
        model at a time.

        Calls `on_wait` before waiting for another process. Raises HubError if it is None, and if
        the file system has no locks.
        """
        path = self.root.parent / ".locks" / self.root.name / "moe-serve.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
        except OSError as error:
            raise unwritable(self.root.parent, error) from error
        try:
            _hold(number, self.root.parent, on_wait)
            yield
        finally:
            os.close(number)

    def _note(self, commit: str) -> Path:
        return self.root / "moe-serve" / f"{commit}.json"


def _hold(number: int, cache: Path, on_wait: Callable[[], None] | None) -> None:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if on_wait is None:
            raise HubError(
                "another process is downloading this model: wait for it, or stop it first."
            ) from None
        on_wait()
        fcntl.flock(number, fcntl.LOCK_EX)
    except OSError as error:
        raise HubError(
            f"the cache {cache} cannot be locked ({error.strerror}): set HF_HUB_CACHE to a folder "
            "on a disk with locks."
        ) from error


def indexed_files(folder: Path) -> set[str] | None:
    """Returns the names of the files in a sharded index; None if there is no readable index."""
    try:
        weight_map = parse_json((folder / INDEX).read_text("utf-8"))["weight_map"]
        return set(map(str, weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def size_of(path: Path) -> int | None:
    """Returns the bytes of a file, or None if the file does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def unwritable(cache: Path, error: OSError) -> HubError:
    """Returns the error for a cache that cannot be written."""
    return HubError(
        f"the cache {cache} cannot be written ({error.strerror}): free space with `moe-serve "
        "models remove`, or set HF_HUB_CACHE to another folder; received bytes are kept."
    )


def _write(path: Path, text: str) -> None:
    """Writes a file at once: a reader sees the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.write_text(text, "utf-8")
    aside.replace(path)
