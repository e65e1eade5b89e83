"""A server that finds the pages of an earlier server answers with the same bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_kernels.kernel_choice import KernelsName
from moe_serve.cache.kv_cache import KVCache
from moe_serve.cache.page_bytes import PageBytes
from moe_serve.cache.tiers.disk_report import clear, report
from moe_serve.config.sections import CacheConfig, ClusterConfig, EngineConfig
from moe_serve.engine.build_tiers import check_tiers
from moe_serve.engine.opened_model import ServedCheckpoint
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.errors import ConfigError
from moe_serve.offline.llm import LLM
from moe_serve.offline.outputs import RequestOutput
from tests.engine.conftest import VARIANTS
from tests.support.engine import disk_writer
from tests.support.kernels.kernel_sets import KERNEL_SETS

GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(max_tokens=11, temperature=1.1, seed=3, ignore_eos=True, logprobs=1)
PROMPTS = [np.random.default_rng(seed).integers(1, 298, 90).tolist() for seed in (1, 2, 3)]


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[RequestOutput]:
    """Waits until the tier is open and returns the answers."""
    deadline = time.monotonic() + 20
    while (tier := llm.stats().tier) is not None and not tier.is_reading:
        assert time.monotonic() < deadline and not tier.state.startswith("writing"), tier.state
        time.sleep(0.005)
    params = [GREEDY, DRAWN, GREEDY][: len(prompts)]
    return llm.generate(prompts, params, use_progress_bar=False)


def content(outputs: list[RequestOutput]) -> list[tuple[object, object]]:
    return [(each.token_ids, each.logprobs) for output in outputs for each in output.outputs]


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_warm_from_disk_is_cold(
    checkpoints: dict[str, Path], variant: str, kernels: KernelsName, dtype: str, tmp_path: Path
) -> None:
    made = {"model": str(checkpoints[variant]), "kernels": kernels, "dtype": dtype}
    with LLM(**made, prefix_cache=False) as llm:  # type: ignore[arg-type]
        cold = content(answers(llm))
    for turn in range(2):
        with LLM(**made, kv_disk=str(tmp_path / "kv")) as llm:  # type: ignore[arg-type]
            outputs = answers(llm)
            assert content(outputs) == cold, f"{turn=}"
            assert [output.num_cached_tokens for output in outputs] == [80 * turn] * 3
    # 90 prompt tokens and 9 or 11 of an answer, of which the last is not computed
    (only,) = report(tmp_path / "kv", now=time.time(), verifies=True)
    assert (only.num_pages, only.num_wrong) == (6 + 6 + 6, 0)
    assert clear(tmp_path / "kv") == only.num_bytes and report(tmp_path / "kv", now=0) == []


def test_encrypted_pages_are_found_by_their_key_only(tiny: str, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    folder, keys = str(tmp_path / "kv"), [tmp_path / "key", tmp_path / "other"]
    for key in keys:
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(32))
    with LLM(tiny, prefix_cache=False) as llm:
        cold = content(answers(llm))
    for turn in range(2):
        with LLM(tiny, kv_disk=folder, kv_disk_key_file=str(keys[0])) as llm:
            outputs = answers(llm)
            assert content(outputs) == cold, f"{turn=}"
            assert [output.num_cached_tokens for output in outputs] == [80 * turn] * 3
    for other, why in ((str(keys[1]), "is not the key"), (None, "has encrypted pages")):
        with pytest.raises(ConfigError, match=why):
            LLM(tiny, kv_disk=folder, kv_disk_key_file=other)
    (only,) = report(tmp_path / "kv", now=time.time(), verifies=True)
    assert only.is_encrypted and (only.num_pages, only.num_wrong) == (18, 0)


def test_a_small_cache_finds_its_evicted_pages(tiny: str, tmp_path: Path) -> None:
    with LLM(tiny, prefix_cache=False) as llm:
        cold = content(answers(llm))
    sizes = {"max_model_len": 128, "num_pages": 10}
    with LLM(tiny, kv_disk=str(tmp_path / "kv"), **sizes) as llm:  # type: ignore[arg-type]
        deadline = time.monotonic() + 20
        while (tier := llm.stats().tier) is not None and not tier.hit_tokens:
            assert time.monotonic() < deadline, "no evicted page was found"
            for prompt, number in zip(PROMPTS, range(3), strict=True):  # each evicts the others'
                params = [GREEDY, DRAWN, GREEDY][number]
                (output,) = llm.generate([prompt], params, use_progress_bar=False)
                assert content([output]) == [cold[number]]


def test_other_weights_share_no_page(tiny: str, tmp_path: Path) -> None:
    """The changed byte is one that the quick identity does not sample."""
    other = tmp_path / "model"
    shutil.copytree(tiny, other)
    with LLM(str(other), kv_disk=str(tmp_path / "kv")) as llm:
        answers(llm)
    (file,) = other.glob("*.safetensors")
    data, size = bytearray(file.read_bytes()), file.stat().st_size
    data[int(size * 0.52)] ^= 1
    file.write_bytes(data)
    with LLM(str(other), kv_disk=str(tmp_path / "kv")) as llm:
        assert [output.num_cached_tokens for output in answers(llm)] == [0, 0, 0]
    assert len(report(tmp_path / "kv", now=time.time())) == 2


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    cache = CacheConfig(disk_path=str(tmp_path))
    check_tiers(EngineConfig(cache=cache))
    with pytest.raises(ConfigError, match=r"cache\.prefix_cache is false"):
        check_tiers(EngineConfig(cache=CacheConfig(disk_path="kv", prefix_cache=False)))
    with pytest.raises(ConfigError, match=r"cache\.disk_path is not"):
        check_tiers(EngineConfig(cache=CacheConfig(disk_key_file="key")))
    check_tiers(EngineConfig(cache=cache, cluster=ClusterConfig(attention_ranks=1, expert_ranks=1)))


def test_pages_of_every_layout_are_copied_whole(checkpoints: dict[str, Path]) -> None:
    for variant in VARIANTS:
        config = EngineConfig().model
        path = str(checkpoints[variant])
        spec = ServedCheckpoint.read(type(config)(path=path)).spec
        for dtype in (torch.float32, torch.bfloat16):
            caches = [KVCache(spec, 4, 16, dtype, torch.device("cpu")) for _ in range(2)]
            for part in caches[0].parts:
                part.copy_(torch.randn(part.shape))
            source, target = map(PageBytes, caches)
            assert source.num_bytes == spec.kv_bytes_per_token(dtype.itemsize) * 16
            assert source.geometry == target.geometry
            data = np.empty(source.num_bytes, dtype=np.uint8)
            source.read(2, data)
            target.write(3, data)
            for one, other in zip(caches[0].parts, caches[1].parts, strict=True):
                assert torch.equal(one[2], other[3]) and not other[1:3].any()


def test_a_killed_server_leaves_an_ordinary_start(tiny: str, tmp_path: Path) -> None:
    folder, chance = tmp_path / "kv", random.Random(4)
    with LLM(tiny, prefix_cache=False) as llm:
        cold = content(answers(llm))
    cut = 0
    for kill in range(2):
        worker = subprocess.Popen(
            [sys.executable, "-m", disk_writer.__name__, tiny, str(folder), str(kill)],
            stdout=subprocess.PIPE,
        )
        assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0.0, 0.4))
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        before, cut = cut, num_cut_pages(folder)
        assert before <= cut <= before + 1, "a server has one thread that writes"
        with LLM(tiny, kv_disk=str(folder)) as llm:
            assert content(answers(llm)) == cold
        assert num_cut_pages(folder) == cut, "a server that ends cuts nothing"


def num_cut_pages(folder: Path) -> int:
    """Returns the pages in a folder whose bytes are not those that their headers prove."""
    return sum(each.num_wrong or 0 for each in report(folder, now=time.time(), verifies=True))
