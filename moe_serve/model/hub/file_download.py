"""Downloads a file: continues where an earlier attempt ended, and checks the hash before use."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from moe_serve.errors import HubError, HubUnreachableError
from moe_serve.model.hub.hub_client import Attempts, HubClient, TransientError
from moe_serve.model.hub.hub_name import HubName
from moe_serve.model.hub.repo_files import RepoFile
from moe_serve.model.hub.repo_folder import RepoFolder, size_of, unwritable

_READ_BYTES = 8 << 20


@dataclass(slots=True)
class FileDownload:
    """A file of one commit on its way into the cache, and the names of its content there."""

    client: HubClient
    name: HubName  # with the commit
    folder: RepoFolder
    file: RepoFile
    names: Sequence[str]  # files of equal content are received once
    note: Callable[[int], None]  # is called with the bytes of each piece

    def run(self) -> None:
        """Fetches the file unless the cache has it, and shows it in the snapshot. Raises HubError;
        the bytes received so far are kept."""
        blob = self.folder.blob(self.file)
        try:
            if size_of(blob) != self.file.size:
                blob.parent.mkdir(parents=True, exist_ok=True)
                self._receive()
                self.folder.partial(self.file).replace(blob)
            for name in self.names:
                self.folder.link(name, self.file.digest, self.name.revision)
        except OSError as error:
            raise unwritable(self.folder.root.parent, error) from error

    def _receive(self) -> None:
        partial = self.folder.partial(self.file)
        with open(partial, "a+b", buffering=0) as out:
            if os.fstat(out.fileno()).st_size > self.file.size:
                out.truncate(0)
            hasher, start = _hash_of(out, self.file)
            attempts = Attempts(self.client.settings, self.client.stop)
            while start < self.file.size:
                try:
                    start = self._append(out, hasher, start, attempts)
                except HubUnreachableError as error:
                    kept = os.fstat(out.fileno()).st_size
                    raise HubUnreachableError(
                        f"{str(error).rstrip('.')}; {kept} of {self.file.size} bytes are kept, and "
                        "the next download continues there."
                    ) from error
            os.fsync(out.fileno())
        if hasher.hexdigest() != self.file.digest:
            partial.unlink()
            raise HubError(
                f"{self.file.name} of {self.name.repo} arrived damaged and was removed: its hash "
                f"is {hasher.hexdigest()}, but the hub lists {self.file.digest} for "
                f"{self.file.size} bytes; run the command again."
            )

    def _append(self, out: BinaryIO, hasher: Any, start: int, attempts: Attempts) -> int:
        """Receives bytes until the file or the connection ends, and returns the new end."""
        try:
            with self.client.pieces(self.name, self.file, start) as pieces:
                for piece in pieces:
                    if start + len(piece) > self.file.size:
                        raise HubError(
                            f"the hub sends more than the {self.file.size} bytes that it lists for "
                            f"{self.file.name} of {self.name.repo}: nothing of it is used."
                        )
                    _write_whole(out, piece)
                    hasher.update(piece)
                    start += len(piece)
                    self.note(len(piece))
                    attempts.progressed()
            if start < self.file.size:
                raise TransientError(f"the connection ended after {start} bytes")
        except TransientError as error:
            attempts.failed(error, f"{self.file.name} of {self.name.repo}")
        return start


def _hash_of(out: BinaryIO, file: RepoFile) -> tuple[Any, int]:
    """Hashes the bytes that an earlier download received, and returns their number."""
    hasher, start = file.hasher(), 0
    out.seek(0)
    while piece := out.read(_READ_BYTES):
        hasher.update(piece)
        start += len(piece)
    return hasher, start


def _write_whole(out: BinaryIO, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[out.write(rest) :]
