"""Names of models, as opposed to folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_serve.errors import HubError
from moe_serve.model.hub.hub_name import (
    HubName,
    folder_model_name,
    hub_hint,
    hub_name_of,
    parse_hub_name,
    snapshot_name,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", "main"),
        ("Qwen/Qwen3-30B-A3B@v1.0", "Qwen/Qwen3-30B-A3B", "v1.0"),
        ("a/b@refs/pr/12", "a/b", "refs/pr/12"),
        (f"a_b/c.d@{COMMIT}", "a_b/c.d", COMMIT),
        ("hf://a/b", "a/b", "main"),
    ],
)
def test_names(text: str, repo: str, revision: str) -> None:
    name = parse_hub_name(text)
    assert (name.repo, name.revision) == (repo, revision)
    assert hub_name_of(text) == name
    assert name.is_pinned == (revision == COMMIT)


@pytest.mark.parametrize(
    "text",
    ["", "a", "a/b/c", "/a/b", "./a", "../b", "~/b", "a/..", "a/b@", "a/b@../x", "a/b@-x", "-a/b",
     "a/b.git", "a--b/c", "a/b/", "a b/c", "a/b@x y", "a/b@x//y", "a/b@/x", "a" * 97 + "/b",
     "a/b\n", "a/b@x\n"],
)  # fmt: skip
def test_texts_that_are_no_names(text: str) -> None:
    assert hub_name_of(text) is None
    with pytest.raises(HubError, match="OWNER/NAME"):
        parse_hub_name(text)
    with pytest.raises(HubError, match="OWNER/NAME"):
        hub_name_of(f"hf://{text}")


def test_a_local_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Mine").mkdir(parents=True)
    (tmp_path / "one" / "b@main").mkdir(parents=True)
    assert hub_name_of("Qwen/Mine") is None
    assert hub_name_of("one/b@main") is None
    # Beside an existing folder, a name is more likely a mistyped path.
    assert hub_name_of("Qwen/Other") is None
    assert hub_name_of("hf://Qwen/Mine") == HubName("Qwen/Mine")
    assert hub_name_of("Other/Mine") == HubName("Other/Mine")
    assert hub_name_of(None) is None


def test_hints() -> None:
    assert "hf://Qwen/Other@v1 " in hub_hint("Qwen/Other@v1")
    assert "OWNER/Qwen3-30B-A3B " in hub_hint("Qwen3-30B-A3B")
    assert hub_hint("/models/Qwen3-30B-A3B") == hub_hint("../x") == hub_hint("") == ""


def test_folders_of_the_cache_have_their_models_name() -> None:
    folder = Path("/cache/models--Qwen--Qwen3-30B-A3B/snapshots") / COMMIT
    assert snapshot_name(folder) == HubName("Qwen/Qwen3-30B-A3B", COMMIT)
    assert folder_model_name(folder) == "Qwen/Qwen3-30B-A3B"
    for other in (Path("/models/tiny"), folder.parent, folder / "x", folder.parents[2] / "a/b/c"):
        assert snapshot_name(other) is None
        assert folder_model_name(other) == other.name
