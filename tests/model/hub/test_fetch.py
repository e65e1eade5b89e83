"""Fetching a model from a hub on 127.0.0.1: whole, interrupted, refused and damaged."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_serve.errors import CheckpointError, HubError, HubUnreachableError
from moe_serve.model.hub import fetch
from moe_serve.model.hub.fetch import cached_model, fetch_config, fetch_model
from moe_serve.model.hub.hub_name import parse_hub_name
from moe_serve.model.hub.hub_settings import HubSettings
from tests.model.hub.conftest import REPO, SERVED, SHARDS, small_model
from tests.support.hub.fake_hub import FakeHub, Fault, fake_hub
from tests.support.server.server_process import server_environment

NAME = parse_hub_name(REPO)
SHARD = "model-00002-of-00003.safetensors"


def served(folder: Path) -> None:
    """Makes every config one of a served family."""
    assert (folder / "config.json").is_file()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_fetches_data_files_and_nothing_else(hub: FakeHub, settings: HubSettings) -> None:
    shown: list[tuple[int, int]] = []
    folder = fetch_model(NAME, settings, served, lambda done, all_: shown.append((done, all_)))
    commit = hub.repos[REPO].revisions["main"]
    assert folder == settings.cache / "models--Tiny--Mixture-1M" / "snapshots" / commit
    assert names(folder) == SERVED
    assert all((folder / name).read_bytes() == small_model()[name] for name in SERVED)
    total = sum(len(small_model()[name]) for name in SERVED)
    assert shown[-1] == (total, total) and sorted(shown) == shown
    assert not hub.asked(".py") and not hub.asked(".bin") and not hub.asked(".pth")
    # Once fetched, only the branch is looked up.
    hub.requests.clear()
    assert fetch_model(NAME, settings, served) == folder
    assert [path for path, _ in hub.requests] == [f"/api/models/{REPO}/revision/main"]


def test_a_pinned_commit_needs_no_hub_once_it_is_there(hub: FakeHub, settings: HubSettings) -> None:
    old = hub.repos[REPO].revisions["main"]
    folder = fetch_model(parse_hub_name(f"{REPO}@{old}"), settings, served)
    new = hub.add(REPO, {**small_model(), "tokenizer_config.json": b'{"new": 1}'})
    hub.requests.clear()
    assert fetch_model(parse_hub_name(f"{REPO}@{old}"), settings, served) == folder
    assert not hub.requests
    newer = fetch_model(NAME, settings, served)
    assert newer.name == new and (newer / SHARD).samefile(folder / SHARD)
    assert hub.sent[SHARD] == len(SHARDS[SHARD])  # equal content is fetched once


def test_a_branch_that_moved_is_followed(hub: FakeHub, settings: HubSettings) -> None:
    hub.add(REPO, {**small_model(), "tokenizer_config.json": b'{"dev": 1}'}, "dev")
    dev = fetch_model(parse_hub_name(f"{REPO}@dev"), settings, served)
    main = fetch_model(NAME, settings, served)
    assert dev != main
    offline = replace(settings, is_offline=True)
    assert fetch_model(parse_hub_name(f"{REPO}@dev"), offline, served) == dev
    assert fetch_model(NAME, offline, served) == main


def test_resumes_where_the_connection_ended(hub: FakeHub, settings: HubSettings) -> None:
    hub.fail(SHARD, Fault(cut_after=150_000), Fault(cut_after=10_000))
    folder = fetch_model(NAME, settings, served)
    assert (folder / SHARD).read_bytes() == SHARDS[SHARD]
    assert hub.asked(SHARD) == ["", "bytes=150000-", "bytes=160000-"]
    assert hub.sent[SHARD] == len(SHARDS[SHARD])


def test_the_next_run_resumes_too(hub: FakeHub, settings: HubSettings) -> None:
    impatient = replace(settings, retry_waits_s=())
    hub.fail(SHARD, Fault(cut_after=150_000))
    with pytest.raises(HubUnreachableError, match=r"150000 of 200002 bytes are kept"):
        fetch_model(NAME, impatient, served)
    with pytest.raises(HubError, match=r"not in the cache|not complete"):
        fetch_model(NAME, replace(settings, is_offline=True), served)
    shown: list[int] = []
    folder = fetch_model(NAME, settings, served, lambda done, _: shown.append(done))
    assert shown[0] >= 150_000
    assert (folder / SHARD).read_bytes() == SHARDS[SHARD]
    assert hub.asked(SHARD) == ["", "bytes=150000-"]


def test_a_server_that_ignores_ranges(hub: FakeHub, settings: HubSettings) -> None:
    hub.fail(SHARD, Fault(cut_after=150_000), Fault(is_whole=True))
    assert (fetch_model(NAME, settings, served) / SHARD).read_bytes() == SHARDS[SHARD]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_hub_is_asked_again(hub: FakeHub, settings: HubSettings, status: int) -> None:
    busy = Fault(status=status, headers={"retry-after": "0"})
    hub.fail("api", busy, busy)
    hub.fail(SHARD, busy)
    assert names(fetch_model(NAME, settings, served)) == SERVED


def test_a_hub_that_stays_busy(hub: FakeHub, settings: HubSettings) -> None:
    hub.fail("api", *[Fault(status=503)] * 3)
    with pytest.raises(HubUnreachableError, match=r"after 3 attempts: it answers HTTP 503; try"):
        fetch_model(NAME, settings, served)


def test_an_unreachable_hub(settings: HubSettings, hub: FakeHub) -> None:
    gone = replace(settings, endpoint="http://127.0.0.1:9")
    with pytest.raises(HubUnreachableError, match=r"from http://127.0.0.1:9 after 3 attempts"):
        fetch_model(NAME, gone, served)
    folder = fetch_model(NAME, settings, served)
    assert fetch_model(NAME, gone, served) == folder  # a complete copy serves meanwhile


def test_tokens(hub: FakeHub, settings: HubSettings) -> None:
    hub.repos[REPO].token = "hf_right"
    with pytest.raises(HubError, match=r"it needs a token; accept the model's terms at .*HF_TOKEN"):
        fetch_model(NAME, settings, served)
    with pytest.raises(HubError, match="the token does not allow it") as refused:
        fetch_model(NAME, replace(settings, token="hf_wrong"), served)
    assert "hf_wrong" not in str(refused.value) + repr(replace(settings, token="hf_wrong"))
    assert names(fetch_model(NAME, replace(settings, token="hf_right"), served)) == SERVED


def test_the_token_is_not_sent_to_other_hosts(hub: FakeHub, settings: HubSettings) -> None:
    with fake_hub() as storage:
        commit = storage.add(REPO, small_model())
        moved = {"location": f"{storage.url}/{REPO}/resolve/{commit}/{SHARD}"}
        hub.fail(SHARD, Fault(status=302, headers=moved))
        folder = fetch_model(NAME, replace(settings, token="hf_secret"), served)
        assert (folder / SHARD).read_bytes() == SHARDS[SHARD]
        assert storage.tokens == [""]
    assert set(hub.tokens) == {"Bearer hf_secret"}


def test_unknown_models_and_revisions(hub: FakeHub, settings: HubSettings) -> None:
    with pytest.raises(HubError, match=r"needs a token for No/Such \(HTTP 401\).*does not exist"):
        fetch_model(parse_hub_name("No/Such"), settings, served)
    with pytest.raises(HubError, match=r"Tiny/Mixture-1M has no revision 'v9' at .*\(HTTP 404\)"):
        fetch_model(parse_hub_name(f"{REPO}@v9"), settings, served)
    hub.fail("api", Fault(status=404, headers={"x-error-code": "RepoNotFound"}))
    with pytest.raises(HubError, match=r"has no model Tiny/Mixture-1M \(HTTP 404\)"):
        fetch_model(NAME, settings, served)
    hub.fail(SHARD, Fault(status=404, headers={"x-error-code": "EntryNotFound"}))
    with pytest.raises(HubError, match=rf"lists the file {SHARD} of .* but does not have it"):
        fetch_model(NAME, settings, served)


@pytest.mark.parametrize("name", [SHARD, "tokenizer_config.json"])  # SHA-256, git's SHA-1
def test_damaged_bytes_are_never_used(hub: FakeHub, settings: HubSettings, name: str) -> None:
    hub.fail(name, Fault(is_damaged=True))
    with pytest.raises(HubError, match=rf"{name} of .* arrived damaged and was removed"):
        fetch_model(NAME, settings, served)
    with pytest.raises(HubError, match="not complete|not in the cache"):
        cached_model(NAME, settings)
    assert names(fetch_model(NAME, settings, served)) == SERVED


def test_a_file_of_another_size(hub: FakeHub, settings: HubSettings) -> None:
    commit = hub.repos[REPO].revisions["main"]
    folder_of = settings.cache / "models--Tiny--Mixture-1M"
    hub.repos[REPO].listed.append(
        {"rfilename": "more.json", "size": 3, "blobId": hashlib.sha1(b"x").hexdigest()}
    )
    hub.repos[REPO].hidden["more.json"] = b"12345"
    with pytest.raises(HubError, match=r"bytes 0 to 5 of more.json .* lists the file with 3 bytes"):
        fetch_model(NAME, settings, served)
    assert not (folder_of / "snapshots" / commit / "more.json").exists()


@pytest.mark.parametrize("path", ["../evil.json", "a/../../evil.json", "/etc/evil", "..\\evil", ""])
def test_names_that_leave_the_folder(hub: FakeHub, settings: HubSettings, path: str) -> None:
    hub.repos[REPO].listed.append({"rfilename": path, "size": 1, "blobId": "0" * 40})
    with pytest.raises(HubError, match="outside its folder|without a name"):
        fetch_model(NAME, settings, served)
    assert not settings.cache.exists()


@pytest.mark.parametrize("digest", ["../../x", "", None, "g" * 40])
def test_hashes_that_are_none(hub: FakeHub, settings: HubSettings, digest: str | None) -> None:
    hub.repos[REPO].listed.append({"rfilename": "a.json", "size": 1, "blobId": digest})
    with pytest.raises(HubError, match="without its size or its hash"):
        fetch_model(NAME, settings, served)


def test_an_index_that_leaves_the_repository(hub: FakeHub, settings: HubSettings) -> None:
    bad = b'{"weight_map": {"t": "../../../etc/model.safetensors"}}'
    hub.add(REPO, {**small_model(), "model.safetensors.index.json": bad})
    with pytest.raises(HubError, match=r"names 1 files, and the repository lacks 1 of them"):
        fetch_model(NAME, settings, served)


def test_only_pickles(hub: FakeHub, settings: HubSettings) -> None:
    files = {n: data for n, data in small_model().items() if not n.endswith("safetensors")}
    del files["model.safetensors.index.json"]
    hub.add(REPO, files)
    with pytest.raises(HubError, match=r"weights only as pytorch_model.bin, and pickles can run"):
        fetch_model(NAME, settings, served)
    del files["pytorch_model.bin"]
    hub.add(REPO, files)
    with pytest.raises(HubError, match=r"has no .safetensors file"):
        fetch_model(NAME, settings, served)
    assert not settings.cache.exists()


def test_no_checkpoint(hub: FakeHub, settings: HubSettings) -> None:
    hub.add(REPO, {"README.md": b"x", "dataset.json": b"{}"})
    with pytest.raises(HubError, match=r"has no config.json among 2 files"):
        fetch_model(NAME, settings, served)


def test_the_family_is_checked_before_the_weights(hub: FakeHub, settings: HubSettings) -> None:
    def check(folder: Path) -> None:
        raise CheckpointError(f"{folder / 'config.json'}: architectures is 'Any'.")

    with pytest.raises(HubError, match=r"so its weights are not downloaded: .* is 'Any'\."):
        fetch_model(NAME, settings, check)
    assert set(hub.sent) == {"config.json"}


def test_a_full_disk(hub: FakeHub, settings: HubSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "free_disk_bytes", lambda folder: 300 << 20)
    monkeypatch.setattr(fetch, "_SPARE_BYTES", 300 << 20)
    with pytest.raises(HubError, match=r"594.8 KiB of its 594.9 KiB are still .* 300.0 MiB free"):
        fetch_model(NAME, settings, served)
    assert not any(name.endswith("safetensors") for name in hub.sent)


def test_a_disk_that_fills_meanwhile(
    hub: FakeHub, settings: HubSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_serve.model.hub import file_download

    def write(out: Any, piece: bytes) -> None:
        if out.name.endswith(".incomplete") and len(piece) > 9_500:
            raise OSError(28, "No space left on device")
        out.write(piece)

    with monkeypatch.context() as full:
        full.setattr(file_download, "_write_whole", write)
        with pytest.raises(HubError, match=r"cannot be written \(No space left on device\)"):
            fetch_model(NAME, settings, served)
    with pytest.raises(HubError, match="not complete|not in the cache"):
        cached_model(NAME, settings)
    assert names(fetch_model(NAME, settings, served)) == SERVED


def test_offline(hub: FakeHub, settings: HubSettings) -> None:
    offline = replace(settings, is_offline=True)
    with pytest.raises(HubError, match=r"not in the cache .* pull .* without HF_HUB_OFFLINE"):
        fetch_model(NAME, offline, served)
    folder = fetch_model(NAME, settings, served)
    hub.requests.clear()
    assert fetch_model(NAME, offline, served) == folder
    (folder / SHARD).unlink()
    missing = rf"1 of the files of {folder.name[:12]} are missing, such as {SHARD}"
    with pytest.raises(HubError, match=missing):
        fetch_model(NAME, offline, served)
    assert not hub.requests


def test_a_snapshot_of_another_tool(hub: FakeHub, settings: HubSettings) -> None:
    """It has the files that its user read. The rest is fetched; offline, the index decides."""
    folder = fetch_model(NAME, settings, served)
    root = folder.parents[1]
    (root / "moe-serve" / f"{folder.name}.json").unlink()
    (folder / "chat_template.jinja").unlink()
    offline = replace(settings, is_offline=True)
    assert fetch_model(NAME, offline, served) == folder
    assert names(fetch_model(NAME, settings, served)) == SERVED
    (root / "moe-serve" / f"{folder.name}.json").unlink()
    (folder / SHARD).unlink()
    with pytest.raises(HubError, match=f"such as {SHARD}"):
        fetch_model(NAME, offline, served)


def test_only_the_config(hub: FakeHub, settings: HubSettings) -> None:
    folder = fetch_config(NAME, settings)
    assert names(folder) == {"config.json"} and set(hub.sent) == {"config.json"}
    with pytest.raises(HubError, match="not in the cache|not complete"):
        cached_model(NAME, settings)


def test_an_answer_that_is_no_hub(hub: FakeHub, settings: HubSettings) -> None:
    hub.fail("api", Fault(status=418))
    with pytest.raises(HubError, match="answers HTTP 418"):
        fetch_model(NAME, settings, served)
    page = replace(settings, endpoint=f"{hub.url}/{REPO}/resolve/main/README.md?")
    with pytest.raises(HubError, match="without JSON"):
        fetch_model(NAME, page, served)


FETCH = (
    "import pathlib, sys; from moe_serve.model.hub.fetch import fetch_model; "
    "from moe_serve.model.hub.hub_name import HubName; "
    "from moe_serve.model.hub.hub_settings import HubSettings; "
    "settings = HubSettings(endpoint=sys.argv[1], cache=pathlib.Path(sys.argv[2])); "
    f"print(fetch_model(HubName({REPO!r}), settings, lambda folder: None))"
)


def fetching(settings: HubSettings) -> subprocess.Popen[str]:
    """Starts a process that fetches the model."""
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, settings.endpoint, str(settings.cache)],
        env=server_environment({"NO_PROXY": "127.0.0.1"}),
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_fetch_once(hub: FakeHub, settings: HubSettings) -> None:
    held = threading.Event()
    hub.fail(SHARD, Fault(cut_after=120_000, waits_for=held))
    with fetching(settings) as one, fetching(settings) as other:
        while len(hub.asked("/revision/main")) < 2:  # both know that the cache lacks it
            assert one.poll() is None and other.poll() is None
            held.wait(0.01)
        held.set()
        folders = {process.communicate(timeout=60)[0] for process in (one, other)}
    assert len(folders) == 1 and names(Path(folders.pop().strip())) == SERVED
    assert all(hub.sent[name] == len(data) for name, data in SHARDS.items())


def test_killed_in_the_middle(hub: FakeHub, settings: HubSettings) -> None:
    held = threading.Event()
    hub.fail(SHARD, Fault(cut_after=120_000, waits_for=held))
    digest = hashlib.sha256(SHARDS[SHARD]).hexdigest()
    partial = settings.cache / NAME.folder_name / "blobs" / f"{digest}.moe-serve.incomplete"
    with fetching(settings) as process:
        while not partial.exists() or partial.stat().st_size < 120_000:
            assert process.poll() is None
            held.wait(0.01)
        process.kill()
    held.set()
    with pytest.raises(HubError, match="not in the cache|not complete"):
        cached_model(NAME, settings)
    assert names(fetch_model(NAME, settings, served)) == SERVED
    assert hub.sent[SHARD] == len(SHARDS[SHARD])
