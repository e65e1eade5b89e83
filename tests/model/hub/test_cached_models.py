"""The list of cached models, and their removal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe_serve.errors import CheckpointError, HubError
from moe_serve.model.hub.cached_models import cached_models, remove_model
from moe_serve.model.hub.fetch import cached_model, fetch_config, fetch_model
from moe_serve.model.hub.hub_name import parse_hub_name
from moe_serve.model.hub.hub_settings import HubSettings
from moe_serve.model.hub.repo_folder import RepoFolder
from tests.model.hub.conftest import REPO, small_model
from tests.support.hub.fake_hub import FakeHub, Fault

NAME = parse_hub_name(REPO)
SHARD = "model-00002-of-00003.safetensors"


def family(folder: Path) -> str:
    return "tiny"


def check(folder: Path) -> None:
    pass


def test_lists_commits_sizes_and_states(hub: FakeHub, settings: HubSettings) -> None:
    assert cached_models(settings, family) == ()
    main = fetch_model(NAME, settings, check)
    hub.add(REPO, {**small_model(), "tokenizer_config.json": b'{"dev": 1}'}, "dev")
    fetch_model(parse_hub_name(f"{REPO}@dev"), settings, check)
    hub.add("Big/Other", {**small_model(), SHARD: b"o" * 300_000})
    hub.fail(SHARD, Fault(cut_after=90_000))
    with pytest.raises(HubError):
        fetch_model(parse_hub_name("Big/Other"), replace(settings, retry_waits_s=()), check)
    other, *two = cached_models(settings, family)
    assert (other.name, other.family, other.is_complete) == ("Big/Other", "tiny", False)
    assert other.problem is not None and "incomplete: " in other.problem
    assert other.num_bytes >= 90_000
    found = next(model for model in two if model.folder == str(main))
    assert (found.name, found.revisions, found.commit) == (REPO, ("main",), main.name)
    assert found.is_complete and found.problem is None
    total = sum(path.stat().st_size for path in main.iterdir())
    assert found.num_bytes == total
    assert found.last_used.endswith("+00:00")


def test_says_which_are_not_served(settings: HubSettings, hub: FakeHub) -> None:
    folder = fetch_model(NAME, settings, check)

    def refuse(folder: Path) -> str:
        raise CheckpointError(f"{folder / 'config.json'}: architectures is 'Any'.")

    (found,) = cached_models(settings, refuse)
    assert found.family is None and found.is_complete
    assert found.problem == "not served: config.json: architectures is 'Any'."
    assert folder.is_dir()


def test_removes_one_revision(hub: FakeHub, settings: HubSettings) -> None:
    main = fetch_model(NAME, settings, check)
    hub.add(REPO, {**small_model(), "tokenizer_config.json": b'{"dev": 1}'}, "dev")
    dev = fetch_model(parse_hub_name(f"{REPO}@dev"), settings, check)
    with pytest.raises(HubError, match=r"Tiny/Mixture-1M@v2 is not in the cache"):
        remove_model(settings, parse_hub_name(f"{REPO}@v2"), has_revision=True)
    done = remove_model(settings, parse_hub_name(f"{REPO}@dev"), has_revision=True)
    assert done.commits == (dev.name,)
    assert 10 < done.num_bytes < 1_000  # what the branches share stays
    assert not dev.exists() and cached_model(NAME, settings) == main
    done = remove_model(settings, parse_hub_name(f"{REPO}@{main.name[:8]}"), has_revision=True)
    assert done.num_bytes > 600_000
    assert cached_models(settings, family) == ()


def test_removes_a_model_with_what_is_unfinished(hub: FakeHub, settings: HubSettings) -> None:
    hub.fail(SHARD, Fault(cut_after=150_000))
    with pytest.raises(HubError):
        fetch_model(NAME, replace(settings, retry_waits_s=()), check)
    done = remove_model(settings, NAME, has_revision=False)
    assert done.num_bytes >= 150_000
    assert not (settings.cache / NAME.folder_name).exists()
    with pytest.raises(HubError, match="Tiny/Mixture-1M is not in the cache"):
        remove_model(settings, NAME, has_revision=False)


def test_does_not_remove_under_a_download(hub: FakeHub, settings: HubSettings) -> None:
    fetch_config(NAME, settings)
    with (
        RepoFolder.of(settings.cache, NAME).lock(None),
        pytest.raises(HubError, match="another process is downloading this model"),
    ):
        remove_model(settings, NAME, has_revision=False)
