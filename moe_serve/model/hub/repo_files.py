"""Chooses the files of a repository that serving reads: data only, never code or pickles."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_serve.errors import HubError, plain
from moe_serve.model.hub.hub_name import HubName, is_commit

CONFIG, INDEX, TOKENIZER = "config.json", "model.safetensors.index.json", "tokenizer.json"
WEIGHTS = ".safetensors"
_WHOLE = "model.safetensors"
_DATA_ENDINGS = (".json", ".jinja")
_DATA_NAMES = frozenset({"merges.txt", "vocab.txt", "tokenizer.model"})
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
_PICKLE_INDEX = (".bin.index.json", ".h5.index.json", ".msgpack.index.json")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+ ()=,-]{0,199}")


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repository. The shared cache names its content by `digest`."""

    name: str
    size: int  # bytes
    digest: str  # SHA-256 of a large file; git's SHA-1 of a small one

    def hasher(self) -> Any:
        """Returns a hash object whose result is `digest` after the whole content."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        # https://git-scm.com/book/en/v2/Git-Internals-Git-Objects: a blob's header comes first.
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class RepoListing:
    """The commit of a revision, and its files at the top level by name."""

    name: HubName  # with the revision that was asked for
    commit: str
    files: Mapping[str, RepoFile]

    @property
    def pinned(self) -> HubName:
        return self.name.at(self.commit)

    @classmethod
    def parse(cls, name: HubName, answer: object) -> RepoListing:
        """Parses the hub's answer. Raises HubError."""
        commit = answer.get("sha") if isinstance(answer, dict) else None
        siblings = answer.get("siblings") if isinstance(answer, dict) else None
        if not isinstance(commit, str) or not is_commit(commit) or not isinstance(siblings, list):
            raise HubError(f"the hub lists {name} without a commit or files: it is not a hub.")
        files = [_file(name, item) for item in siblings]
        return cls(name, commit, {file.name: file for file in files if file is not None})

    def small_files(self) -> list[RepoFile]:
        """Returns the files beside the weights: configs, tokenizer and templates."""
        return [
            file
            for file in self.files.values()
            if (file.name.endswith(_DATA_ENDINGS) and not file.name.endswith(_PICKLE_INDEX))
            or file.name in _DATA_NAMES
        ]

    def weight_files(self, indexed: Iterable[str] | None) -> list[RepoFile]:
        """Returns the files of the weights: those that the index names, if there is one. Raises
        HubError if the repository lacks one."""
        if indexed is not None:
            names = sorted(set(indexed))
        elif _WHOLE in self.files:
            names = [_WHOLE]
        else:
            names = sorted(name for name in self.files if name.endswith(WEIGHTS))
        absent = [name for name in names if name not in self.files or not name.endswith(WEIGHTS)]
        if absent:
            raise HubError(
                f"{self.name} cannot be served: its {INDEX} names {len(names)} files, and the "
                f"repository lacks {len(absent)} of them, such as {plain(absent[0], 80)}."
            )
        return [self.files[name] for name in names]

    def check(self) -> None:
        """Raises HubError if the files cannot be those of a model that is served."""
        for needed in (CONFIG, TOKENIZER):
            if needed not in self.files:
                raise HubError(
                    f"{self.name} cannot be served: its repository has no {needed} among "
                    f"{len(self.files)} files, so it is not a checkpoint in Hugging Face layout."
                )
        if any(name.endswith(WEIGHTS) for name in self.files):
            return
        pickles = sorted(name for name in self.files if name.endswith(_PICKLES))
        if pickles:
            raise HubError(
                f"{self.name} cannot be served: it has weights only as {pickles[0]}, and pickles "
                "can run code and are never downloaded; choose a revision or a model with "
                "safetensors."
            )
        raise HubError(f"{self.name} cannot be served: its repository has no {WEIGHTS} file.")


def _file(name: HubName, item: object) -> RepoFile | None:
    """Reads one file of a listing; None for files in folders, which no checkpoint needs.

    Raises HubError for a name that leads out of the repository, and for a malformed entry.
    """
    path = item.get("rfilename") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(path, str) or not path:
        raise HubError(f"the hub lists a file of {name} without a name.")
    if path.startswith("/") or "\\" in path or {"..", ".", ""} & set(path.split("/")):
        raise HubError(
            f"the hub lists {plain(path, 80)!r} as a file of {name}, which lies outside its "
            "folder: nothing of it is downloaded."
        )
    if not _FILE_NAME.fullmatch(path):
        return None
    large = item.get("lfs")
    size = large.get("size") if isinstance(large, dict) else item.get("size")
    digest = large.get("sha256") if isinstance(large, dict) else item.get("blobId")
    is_sized = isinstance(size, int) and not isinstance(size, bool) and size >= 0
    if not is_sized or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise HubError(f"the hub lists {path} of {name} without its size or its hash.")
    assert isinstance(size, int), "checked above"
    return RepoFile(path, size, digest)
