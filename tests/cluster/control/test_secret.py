"""Where the cluster secret comes from, and that it is not shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_serve.cluster.control.secret import (
    ClusterSecret,
    new_secret,
    read_secret,
    secret_from_environment,
)
from moe_serve.config.sources import CLUSTER_SECRET_VARIABLE, load_config
from moe_serve.errors import ConfigError

TEXT = "0123456789abcdef" * 2


def test_a_new_secret_is_random_and_passes_through_the_environment() -> None:
    first, second = new_secret(), new_secret()
    assert first != second, "two clusters share a secret"
    assert read_secret(first.environment()) == first


def test_none_where_the_environment_names_none() -> None:
    assert read_secret({}) is None
    assert read_secret({CLUSTER_SECRET_VARIABLE: " "}) is None


def test_a_file_holds_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(TEXT + "\n")
    assert read_secret({CLUSTER_SECRET_VARIABLE: f"@{file}"}) == ClusterSecret(TEXT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("short", "has 5 characters and needs at least 32"),
        ("with a blank in it, and long enough", "one printable word"),
        ("@/nowhere/at/all", "cannot read the cluster secret in /nowhere/at/all"),
    ],
)
def test_a_bad_secret_is_refused_without_showing_it(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_secret({CLUSTER_SECRET_VARIABLE: text})
    assert text.startswith("@") or text not in str(caught.value), "the message shows the secret"


def test_it_is_not_shown() -> None:
    assert TEXT not in repr(ClusterSecret(TEXT))


def test_a_proof_binds_role_and_parts() -> None:
    secret = ClusterSecret(TEXT)
    proofs = {
        secret.proof("connecting", b"a", b"b"),
        secret.proof("accepting", b"a", b"b"),
        secret.proof("connecting", b"b", b"a"),
        secret.proof("connecting", b"ab", b""),
        ClusterSecret(TEXT[::-1]).proof("connecting", b"a", b"b"),
    }
    assert len(proofs) == 5, "two different exchanges have the same proof"


def test_a_worker_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="MOE_SERVE_CLUSTER_SECRET is not set"):
        secret_from_environment()
    monkeypatch.setenv(CLUSTER_SECRET_VARIABLE, TEXT)
    assert secret_from_environment() == ClusterSecret(TEXT)


def test_the_configuration_knows_the_variable() -> None:
    """It is no mistake in the environment, and no part of what is sent to ranks or printed."""
    told = load_config(flags={}, environ={CLUSTER_SECRET_VARIABLE: TEXT})
    assert told == load_config(flags={}, environ={}) and TEXT not in repr(told)
    with pytest.raises(ConfigError, match=f"{CLUSTER_SECRET_VARIABLE}S"):
        load_config(flags={}, environ={f"{CLUSTER_SECRET_VARIABLE}S": TEXT})
