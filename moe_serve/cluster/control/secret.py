"""The secret shared by every process of one cluster, which proves that it belongs to it.

On a single host it is random and reaches the workers through their environment. For many hosts
`MOE_SERVE_CLUSTER_SECRET` holds it, or `@FILE` with a file that does. It is never on a command
line, and its repr does not show it.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moe_serve.config.sources import CLUSTER_SECRET_VARIABLE
from moe_serve.errors import ConfigError
from moe_serve.regular_file import regular_file

MIN_SECRET_LENGTH = 32  # characters
_ADVICE = "make one with: openssl rand -hex 32"


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """A secret of printable text, at least MIN_SECRET_LENGTH long (`cluster_secret` checks it)."""

    text: str = field(repr=False)

    def proof(self, role: str, *parts: bytes) -> bytes:
        """Returns the HMAC-SHA256 (32 bytes) of the role and the parts, each preceded by its
        length."""
        mac = hmac.new(self.text.encode(), digestmod="sha256")
        for part in (role.encode(), *parts):
            mac.update(len(part).to_bytes(4, "big") + part)
        return mac.digest()

    def environment(self) -> dict[str, str]:
        """Returns the variables from which a worker's `read_secret` takes the secret."""
        return {CLUSTER_SECRET_VARIABLE: self.text}


def new_secret() -> ClusterSecret:
    return ClusterSecret(secrets.token_hex(32))


def read_secret(environ: Mapping[str, str]) -> ClusterSecret | None:
    """Reads the secret from the environment; None if it is not set. Raises ConfigError."""
    value = environ.get(CLUSTER_SECRET_VARIABLE, "").strip()
    if not value:
        return None
    if not value.startswith("@"):
        return cluster_secret(value, CLUSTER_SECRET_VARIABLE)
    path = Path(value[1:])
    try:
        text = regular_file(path).read_text("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the cluster secret in {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the cluster secret in {path} is not UTF-8 text; {_ADVICE}") from error
    return cluster_secret(text, str(path))


def secret_from_environment() -> ClusterSecret:
    """Reads the secret that this worker was started with; raises ConfigError if it is not set."""
    secret = read_secret(os.environ)
    if secret is None:
        raise ConfigError(
            f"{CLUSTER_SECRET_VARIABLE} is not set: every process of a cluster needs the same "
            f"secret, or @FILE that holds it; {_ADVICE}"
        )
    return secret


def cluster_secret(text: str, where: str) -> ClusterSecret:
    if len(text) < MIN_SECRET_LENGTH:
        raise ConfigError(
            f"the cluster secret in {where} has {len(text)} characters and needs at least "
            f"{MIN_SECRET_LENGTH}; {_ADVICE}"
        )
    if not text.isprintable() or any(character.isspace() for character in text):
        raise ConfigError(f"the cluster secret in {where} must be one printable word; {_ADVICE}")
    return ClusterSecret(text)
