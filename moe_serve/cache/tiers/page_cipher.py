"""Encrypts the pages of a disk tier with AES-256-GCM, with a key file that the operator keeps.

    slot     | header, HMAC, nonce, tag | encrypted payload |

The names of pages, which are hashes of prompts, are replaced by keyed ones, so that without the key
file a guessed prompt cannot be found in the folder. A header's digest is that of the encrypted
bytes, so damage is found without the key. A page is bound to its
header without that digest: a page that was put under another name, or whose expiry was changed,
cannot be decrypted.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.tiers.disk_folder import identity_folders, write_whole
from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

ENCRYPTION = "aes-256-gcm"
_CHECK = "key.check"  # in the folder of the tier: salt and HMAC of the key
_KEY_BYTES = _SALT_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
_PART = 64 * 2**10  # bytes that are encrypted at a time; other threads run in between


@dataclass(frozen=True, slots=True)
class DiskKey:
    """The content of a key file."""

    path: Path
    secret: bytes

    @classmethod
    def read(cls, path: Path, folder: Path) -> DiskKey:
        """Reads the key for the tier in `folder`. Raises ConfigError if the file cannot be trusted,
        or the package that encrypts is missing."""
        _check_package()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                secret = file.read(_KEY_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
        except OSError as error:
            raise ConfigError(
                f"cache.disk_key_file {path} cannot be read: {error.strerror or error}. Make a key "
                f"with (umask 077; openssl rand -out {path} {_KEY_BYTES}), or leave it out."
            ) from None
        _check_file(path, folder, status, len(secret))
        return cls(path, secret)

    def cipher(self, salt: bytes) -> PageCipher:
        """Returns the cipher for the pages of one identity. Each identity has its own random
        `salt`.
        """
        return PageCipher(self.derive("pages", salt), self.derive("names", salt))

    def is_of(self, noted: bytes) -> bool:
        """Returns whether the folder of a tier was made with this key."""
        salt, mac = noted[:_SALT_BYTES], noted[_SALT_BYTES:]
        return hmac.compare_digest(mac, self.derive("check", salt))

    def derive(self, purpose: str, salt: bytes) -> bytes:
        """Derives a separate key for a purpose."""
        return hmac.digest(self.secret, f"moe-serve kv {purpose} ".encode() + salt, "sha256")


class PageCipher:
    """Encrypts and decrypts pages. Any thread may call it."""

    def __init__(self, page_key: bytes, name_key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import algorithms

        self._algorithm, self._name_key = algorithms.AES(page_key), name_key

    def name(self, key: bytes) -> bytes:
        """Returns the name under which the page with a key is stored."""
        return hmac.digest(self._name_key, key, "sha256")

    def encrypt(self, page: NDArray[np.uint8], context: bytes) -> tuple[NDArray[np.uint8], bytes]:
        """Returns the encrypted bytes, and the nonce and tag. `context` is authenticated, too."""
        from cryptography.hazmat.primitives.ciphers import Cipher, modes

        nonce = secrets.token_bytes(_NONCE_BYTES)
        encryptor = Cipher(self._algorithm, modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(context)
        data = _passed(encryptor, page)
        encryptor.finalize()
        return data, nonce + encryptor.tag

    def decrypt(
        self, data: NDArray[np.uint8], context: bytes, seal: bytes
    ) -> NDArray[np.uint8] | None:
        """Returns the page; None if the key, `context`, or nonce and tag are not those that it was
        encrypted with."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, modes

        nonce, tag = seal[:_NONCE_BYTES], seal[_NONCE_BYTES:]
        decryptor = Cipher(self._algorithm, modes.GCM(nonce, tag)).decryptor()
        decryptor.authenticate_additional_data(context)
        page = _passed(decryptor, data)
        try:
            decryptor.finalize()
        except InvalidTag:
            return None
        return page


def check_key(folder: Path, key: DiskKey | None) -> None:
    """Raises ConfigError if the pages in the folder of a tier were written with another key. A
    new folder takes the key."""
    try:
        noted = _noted(folder)
        if noted is None and key is not None and not identity_folders(folder):
            salt = secrets.token_bytes(_SALT_BYTES)
            noted = salt + key.derive("check", salt)
            write_whole(folder / _CHECK, noted)
    except OSError as error:
        raise ConfigError(
            f"cache.disk_path {folder} cannot be used: {error.strerror or error}. Give a folder "
            "that this user can write, or leave the disk tier off."
        ) from None
    remedy = f"remove the pages with moe-serve cache clear {folder}"
    if key is None and noted is not None:
        raise ConfigError(
            f"cache.disk_path {folder} has encrypted pages: give their key in "
            f"cache.disk_key_file, or {remedy}."
        )
    if key is not None and noted is None:
        raise ConfigError(
            f"cache.disk_key_file is set, but the pages in cache.disk_path {folder} are not "
            f"encrypted: {remedy}, or give another folder."
        )
    if key is not None and noted is not None and not key.is_of(noted):
        raise ConfigError(
            f"cache.disk_key_file {key.path} is not the key of the pages in {folder}: give the "
            f"file with which they were encrypted, or {remedy}."
        )


def forget_key(folder: Path) -> None:
    """Allows a folder without pages to use another key, or no key. Raises OSError."""
    (folder / _CHECK).unlink(missing_ok=True)


def _noted(folder: Path) -> bytes | None:
    try:
        return (folder / _CHECK).read_bytes()
    except FileNotFoundError:
        return None


def _passed(context: CipherContext, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Runs data through a cipher. The result has the same length."""
    made = np.empty(len(data) + 15, dtype=np.uint8)  # the cipher wants room for a block
    for at in range(0, len(data), _PART):
        context.update_into(data[at : at + _PART].data, made[at:].data)
    return made[: len(data)]


def _check_package() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigError(
            "cache.disk_key_file needs the package cryptography, which is not installed: run "
            "pip install 'moe-serve[encryption]', or leave it out."
        ) from None


def _check_file(path: Path, folder: Path, status: os.stat_result, num_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode) or num_bytes != _KEY_BYTES:
        raise ConfigError(
            f"cache.disk_key_file {path} must be a file of {_KEY_BYTES} bytes, not of "
            f"{status.st_size}: make one with (umask 077; openssl rand -out {path} {_KEY_BYTES})."
        )
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"cache.disk_key_file {path} belongs to user {status.st_uid}, and this process runs as "
            f"{os.geteuid()}: give a file of this user."
        )
    if status.st_mode & 0o077:
        raise ConfigError(
            f"cache.disk_key_file {path} is open to other users (mode "
            f"{status.st_mode & 0o777:o}): run chmod 600 {path}."
        )
    if path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"cache.disk_key_file {path} is inside cache.disk_path {folder}, where it would be "
            "copied or stolen together with the pages: keep it elsewhere."
        )
