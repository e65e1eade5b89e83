"""The layer that predicts further tokens computes what its description says, and drafts a chain."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import modeling_layers

from moe_kernels.kernel_choice import KernelsName
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.families import family_of
from moe_serve.model.load.load_mtp import MTPLoader
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.mtp_stage import MTPPart
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.transport import LocalTransport
from tests.support.families.mtp import MTPReference, write_with_mtp
from tests.support.families.parity import random_prompts

NAMES = (
    "glm4_moe",
    "glm4_moe-qk-norm-groups",
    "deepseek_v3-groups",
    "deepseek_v3-halves",
    "glm4_moe_lite",
    "exaone_moe",
    "mellum",
)
PAGES = (4, 9, 1, 7, 2, 8)
NUM_TOKENS, CHUNK = 70, 23


@cache
def folder_of(root: Path, name: str, is_own_head: bool) -> Path:
    return write_with_mtp(root / f"{name}-{is_own_head}", name, is_own_head=is_own_head)


class Served:
    """A model with its MTP layer, without an engine."""

    def __init__(self, folder: Path, kernels: KernelsName) -> None:
        loader = ModelLoader(folder, kernels=kernels, dtype=torch.float32)
        config = HFConfig.read(folder)
        family = family_of(config)
        assert family.read_mtp is not None, f"{family.name} has no rule"
        layer = family.read_mtp(config.text(), family.names, loader.spec)
        opened = MTPLoader.open(loader, layer)
        self.cache = KVCache(loader.spec, 9, 16, torch.float32, loader.device)
        stage = loader.attention_stage(512)
        self.part: MTPPart = opened.load(stage, self.cache, 512)
        transport = LocalTransport(loader.expert_stage())
        self.pipeline = Pipeline(stage, transport, self.cache, loader.device)
        self.pipeline.keeps_every_row = True

    def states(self, tokens: list[int]) -> Tensor:
        """Returns the layer's states of all positions but the last, computed in chunks."""
        parts = []
        for start in range(0, len(tokens) - 1, CHUNK):
            ids = np.array(tokens[start : start + CHUNK])
            following = np.array(tokens[start + 1 : start + CHUNK + 1])
            batch = MicroBatch((SequenceSlice(0, start, ids[: len(following)], PAGES, 1),))
            self.pipeline.run(StepPlan((batch,)))
            hidden_TD = self.pipeline.hidden_TD
            assert hidden_TD is not None, "the pipeline keeps its rows"
            batch = MicroBatch((SequenceSlice(0, start, following, PAGES, 1),))
            parts.append(self.part.stage.first_states(batch, hidden_TD, self.part.cache))
        return torch.cat(parts)

    def next_state(self, state_1D: Tensor, token: int, position: int) -> Tensor:
        piece = SequenceSlice(0, position, np.array([token]), PAGES, 1)
        return self.part.stage.next_states(MicroBatch((piece,)), state_1D, self.part.cache)


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_description(
    tmp_path_factory: pytest.TempPathFactory, name: str, kernels: KernelsName
) -> None:
    """All positions are compared, and three tokens drafted behind the last one."""
    folder = folder_of(tmp_path_factory.getbasetemp(), name, False)
    check(Served(folder, kernels), MTPReference(folder))


def test_a_checkpoint_may_have_another_embedding_and_head(tmp_path: Path) -> None:
    folder = write_with_mtp(tmp_path, "glm4_moe", is_own_head=True)
    check(Served(folder, "native"), MTPReference(folder))


@pytest.mark.parametrize("name", ["glm4_moe-qk-norm-groups", "deepseek_v3-groups"])
def test_the_reference_is_that_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """Only newer releases of transformers have the layer."""
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this release of transformers has no MTP layers")
    reference = MTPReference(folder_of(tmp_path_factory.getbasetemp(), name, False))
    (tokens,) = random_prompts((NUM_TOKENS,))
    states_TD = reference.states(tokens[:-1])
    expected_TD = reference.theirs(states_TD, tokens[1:])
    torch.testing.assert_close(reference.next_states(states_TD, tokens[1:]), expected_TD)


def check(served: Served, reference: MTPReference) -> None:
    (tokens,) = random_prompts((NUM_TOKENS,))
    states_TD, expected_TD = served.states(tokens), reference.states(tokens[:-1])
    following, inputs_TD = tokens[1:], expected_TD
    for depth in range(4):
        expected_TD = reference.next_states(inputs_TD, following)
        found, expected = served.part.stage.logits(states_TD), reference.logits(expected_TD)
        if depth:
            expected = expected[-1:]
        error = float((found - expected).abs().max() / expected.abs().max())
        assert error < 1e-5, f"{depth=}, {error=:.2e}"
        assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()
        token = int(found[-1].argmax())
        following, inputs_TD = [*following, token], torch.cat((inputs_TD, expected_TD[-1:]))
        states_TD = served.next_state(states_TD[-1:], token, NUM_TOKENS - 1 + depth)
