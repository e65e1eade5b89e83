"""The accepted keys, stored as digests: those of the configuration and those of a file.

A key may be followed by its own settings on the same line, as in `s3cret min_priority=-10`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_serve.config.keys import RANGES
from moe_serve.config.sources import read_secret_file, split_key
from moe_serve.errors import ConfigError
from moe_serve.http.schema.file_watch import FileWatch

_LOGGER = logging.getLogger(__name__)
_LOOK_S = 1.0  # seconds between two checks of the file
_INTEGER = re.compile(r"-?[0-9]{1,10}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySettings:
    """Settings of one key that replace those of the configuration; None: not set."""

    min_priority: int | None = None


NO_SETTINGS = KeySettings()


class KeyRing:
    """A set of keys. `file` has one key per line and is read again when it changes.

    Raises ConfigError if the file cannot be read at the start. Later, if a changed file cannot be
    read or contains no key, the keys stay unchanged: a half-written file neither locks out nor
    admits clients.
    """

    def __init__(self, keys: Sequence[str], file: str | None = None) -> None:
        self._fixed, self._file = _parsed(keys), file
        self._watch = FileWatch(() if file is None else (file,))
        self._keys = self._fixed | ({} if file is None else _parsed(read_secret_file(file)))
        self._next_look = time.monotonic() + _LOOK_S

    @property
    def is_empty(self) -> bool:
        """True if no key is required."""
        return not self._keys

    def find(self, key: bytes) -> bytes | None:
        """The key's digest if it is in the ring. The time does not depend on which key matches."""
        self._look()
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        return digest if any(matches) else None

    def settings(self, digest: bytes) -> KeySettings:
        """The settings of a key that `find` has returned."""
        return self._keys.get(digest, NO_SETTINGS)

    def _look(self) -> None:
        now = time.monotonic()
        if self._file is None or now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        if not self._watch.has_changed():
            return
        try:
            self._keys = self._fixed | _parsed(read_secret_file(self._file))
        except ConfigError as error:
            _LOGGER.error("the API keys stay unchanged: %s", error)
            return
        _LOGGER.warning("%s has changed: %d API keys are accepted", self._file, len(self._keys))


def _parsed(lines: Iterable[str]) -> dict[bytes, KeySettings]:
    return dict(_parse(line) for line in lines)


def _parse(line: str) -> tuple[bytes, KeySettings]:
    """The digest of a line's key, and its settings. Error messages never show the key."""
    key, settings = split_key(line)
    values = dict(settings)
    if len(values) < len(settings) or values.keys() - {"min_priority"}:
        raise ConfigError(
            f"API keys: {', '.join(f'{name}=' for name, _ in settings)} after a key is not "
            "valid: the only setting is min_priority=NUMBER, given once."
        )
    own = KeySettings(min_priority=_min_priority(values.get("min_priority")))
    return hashlib.sha256(key.encode()).digest(), own


def _min_priority(text: str | None) -> int | None:
    if text is None:
        return None
    low, high = RANGES["server.key_min_priority"]
    if not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
        raise ConfigError(
            f"API keys: min_priority of a key must be an integer in [{low}, {high}], got "
            f"{text[:40]!r}."
        )
    return int(text)
