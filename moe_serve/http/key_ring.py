"""The keys that are let in, as digests: those of the configuration, and those of a file."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence

from moe_serve.config_sources import read_secret_file
from moe_serve.errors import ConfigError
from moe_serve.http.file_watch import FileWatch

_LOGGER = logging.getLogger(__name__)
_LOOK_S = 1.0  # between two looks at the file


class KeyRing:
    """`file`: one key a line, read again when it changes; raises ConfigError if it cannot be read.

    A changed file that cannot be read, or that holds no key, leaves the keys as they were: nobody
    is locked out, or let in, by half a file.
    """

    def __init__(self, keys: Sequence[str], file: str | None = None) -> None:
        self._fixed, self._file = _digests(keys), file
        self._watch = FileWatch(() if file is None else (file,))
        self._digests = self._fixed + ([] if file is None else _digests(read_secret_file(file)))
        self._next_look = time.monotonic() + _LOOK_S

    @property
    def is_empty(self) -> bool:
        """No key is asked for."""
        return not self._digests

    def find(self, key: bytes) -> bytes | None:
        """The key's digest if it is one of these; takes as long whichever it is."""
        self._look()
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest if any(matches) else None

    def _look(self) -> None:
        now = time.monotonic()
        if self._file is None or now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        if not self._watch.has_changed():
            return
        try:
            self._digests = self._fixed + _digests(read_secret_file(self._file))
        except ConfigError as error:
            _LOGGER.error("the API keys stay as they were: %s", error)
            return
        _LOGGER.warning("%s has changed: %d API keys are let in", self._file, len(self._digests))


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]
