"""The kernels' sampler against the host's, over generated steps of mixed rows; one engine run."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels.gpu.sampling.gpu_sampler import download, likeliest, upload
from moe_kernels.interface.token_sampler import TokenMasks
from moe_kernels.kernel_choice import choose_kernels
from moe_serve.config.sections import CacheConfig, EngineConfig, ModelConfig
from moe_serve.engine.build import build_engine
from moe_serve.engine.request.request import FinishReason, GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampler import Sampled, Sampler, uniform
from moe_serve.engine.sampling.sampling_backend import KernelSampler, make_sampler
from tests.support.engine.points import ends_of
from tests.support.families.case import TINY, Case
from tests.support.families.parity import write_checkpoint

VOCAB = 150  # two blocks
EOS = frozenset({3, 140})
TIE = 1e-6  # relative: how near to a boundary another rounding may choose the neighbour
TOKENS = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-6]),
    top_k=st.sampled_from([0, -1, 1, 7, 1000]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.1, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -0.5, 3.25, 100.0]), max_size=3),
    min_tokens=st.integers(0, 3),
    max_tokens=st.none(),
    stop_token_ids=st.sampled_from([(), (7, 3)]),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.sampled_from([None, None, 0, 2, 20]),
)
ROWS = st.tuples(
    PARAMS,
    st.lists(TOKENS, min_size=1, max_size=6),
    st.lists(TOKENS, max_size=6),
    st.integers(0, 3),
    st.sampled_from(["usual", "tied", "equal", "nan", "infinite", "banned"]),
)
Row = tuple[SamplingParams, list[int], list[int], int, str]


def make_sequence(row: Row) -> Sequence:
    params, prompt, answer, choice, _ = row
    made = Sequence(
        0,
        GenerationRequest(
            request_id="r", prompt_token_ids=tuple(prompt), params=params, choice=choice
        ),
    )
    for token in answer:
        made.append(token)
    return made


def make_logits(rows: list[Row]) -> Tensor:
    made = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(len(rows))) * 3
    for logits, (*_, kind) in zip(made, rows, strict=True):
        if kind == "tied":
            logits.round_()
        elif kind == "equal":
            logits.zero_()
        elif kind == "nan":
            logits[131] = math.nan
        elif kind == "infinite":
            logits[2] = math.inf
        elif kind == "banned":
            logits[4:] = -math.inf
    return made


def tokens_at_ties(logits_V: Tensor, sequence: Sequence) -> set[int]:
    """Returns the tokens that a draw may give, in fp64, if its number, top-p and min_p are each off
    by one rounding."""
    params, probs = sequence.request.params, torch.softmax(
        logits_V.double() / sequence.request.params.temperature, dim=-1
    )  # fmt: skip
    draw = uniform(sequence.seed, sequence.request.choice, sequence.num_tokens)
    found = set()
    for off_draw, off_top, off_min in itertools.product((-TIE, 0.0, TIE), repeat=3):
        order = probs.sort(descending=True).values
        keep = order >= params.min_p * (1 + off_min) * order[0]
        if params.top_k > 0:
            keep &= torch.arange(len(order)) < params.top_k
        kept = order * keep
        before = kept.cumsum(0) - kept
        keep &= before < (params.top_p + off_top if params.top_p < 1 else 2.0) * kept.sum()
        least = order[max(0, int(keep.sum()) - 1)]
        cumulative = (probs * (probs >= least * (1 - TIE))).cumsum(0)
        place = int(torch.searchsorted(cumulative, (draw + off_draw) * cumulative[-1], right=True))
        found.add(min(place, int(torch.searchsorted(cumulative, cumulative[-1]))))
    return found


def check_scores(found: Sampled, logits_V: Tensor, wanted: int | None) -> None:
    assert (found.logprob is None) == (wanted is None), f"{wanted} asked for"
    if found.logprob is None or wanted is None:
        return
    entry, logprobs = found.logprob, torch.log_softmax(logits_V.double(), -1)
    assert entry.token_id == found.token_id, "the score of another token"
    assert entry.rank == int((logits_V > logits_V[entry.token_id]).sum()) + 1, f"{entry}"
    order = sorted(range(VOCAB), key=lambda i: (-float(logits_V[i]), i))[:wanted]
    assert [i for i, _ in entry.top] == order, f"{entry}"
    for token, value in (*entry.top, (entry.token_id, entry.logprob)):
        assert value == pytest.approx(float(logprobs[token]), rel=1e-5, abs=1e-5), f"{entry}"
    assert dict(entry.top).get(entry.token_id, entry.logprob) == entry.logprob, "two values of one"


PLAIN = SamplingParams(temperature=0.0)
MIXED: list[Row] = [
    (PLAIN, [1], [], 0, "equal"),
    (SamplingParams(temperature=1.0, seed=1), [1], [], 0, "nan"),
    (SamplingParams(temperature=1.0, seed=2, min_tokens=1), [1], [], 0, "infinite"),
    (SamplingParams(temperature=1.0, seed=3, top_k=2, logprobs=1), [1], [5], 0, "tied"),
]


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.lists(ROWS, min_size=1, max_size=5))
@example(rows=MIXED)
@example(rows=[(SamplingParams(temperature=0.0, min_tokens=1), [1], [], 0, "banned")])
@example(rows=[(PLAIN, [1], [], 0, "nan"), (PLAIN, [1], [], 0, "usual")])
def test_the_hosts_tokens(rows: list[Row], device: torch.device) -> None:
    sequences, logits = [make_sequence(row) for row in rows], make_logits(rows)
    host, given_logits = Sampler(EOS), logits.to(device)
    backend = make_sampler(EOS, choose_kernels(device, torch.float32, "triton"))
    assert isinstance(backend, KernelSampler), f"{backend} samples for the Triton set"
    found, expected = (
        backend.sample(given_logits, ends_of(sequences)),
        host.sample(logits, ends_of(sequences)),
    )
    assert torch.equal(given_logits.cpu().nan_to_num(7), logits.nan_to_num(7)), "logits changed"
    adjusted = host._adjust(logits, ends_of(sequences))
    for row, sequence in enumerate(sequences):
        params, told = sequence.request.params, f"row {row} of {rows}: {found[row]}"
        assert found[row].is_valid == expected[row].is_valid, told
        assert 0 <= found[row].token_id < VOCAB, told
        if not found[row].is_valid:
            continue
        if found[row].token_id != expected[row].token_id:
            assert not params.is_greedy, f"{told} instead of {expected[row]}"
            ties = tokens_at_ties(adjusted[row], sequence)
            assert {found[row].token_id, expected[row].token_id} <= ties, f"{told}, not of {ties}"
        check_scores(found[row], logits[row], params.logprobs)


def test_masked_rows(device: torch.device) -> None:
    """Masked rows give the host's tokens; free rows have no mask."""
    drawn = SamplingParams(max_tokens=None, seed=1, top_k=5, repetition_penalty=1.3, logprobs=2)
    params = (PLAIN, drawn, PLAIN, drawn)
    kinds = ("usual", "usual", "nan", "usual")
    rows = [(p, [1, 9], [9], i, k) for i, (p, k) in enumerate(zip(params, kinds, strict=True))]
    sequences, logits = [make_sequence(row) for row in rows], make_logits(rows)
    allowed = [range(2), range(31, 150, 9), range(130, 132)]
    is_free = np.zeros((3, 160), np.bool_)
    for row, tokens in zip(is_free, allowed, strict=True):
        row[list(tokens)] = True
    bits = np.packbits(is_free, axis=1, bitorder="little").view(np.uint32)
    masks = TokenMasks(np.array([0, 1, 2]), bits)
    backend = make_sampler(EOS, choose_kernels(device, torch.float32, "triton"))
    found = backend.sample(logits.to(device), ends_of(sequences), masks)
    expected = Sampler(EOS).sample(logits, ends_of(sequences), masks)
    assert (
        [s.is_valid for s in found] == [s.is_valid for s in expected] == [True, True, False, True]
    )
    for row in (0, 1, 3):
        assert found[row].token_id == expected[row].token_id
    assert found[0].token_id in allowed[0] and found[1].token_id in allowed[1]
    check_scores(found[1], logits[1], 2)
    alone = backend.sample(logits[3:4].to(device), ends_of(sequences[3:4]))
    assert alone == found[3:4], "a free row does not see the others' masks"


def test_given_tokens_as_on_the_host(device: torch.device) -> None:
    fields: tuple[dict[str, object], ...] = ({"logprobs": 2}, {})
    fields += ({"logprobs": 0, "logprob_token_ids": (149, 3, 0)},)
    params = [SamplingParams(temperature=0.0, max_tokens=None, **f) for f in fields]  # type: ignore[arg-type]
    rows: list[Row] = [(p, [1], [], 0, "usual") for p in params]
    logits, sequences = make_logits(rows), [make_sequence(row) for row in rows]
    kernels = choose_kernels(device, torch.float32, "triton")
    mine = make_sampler(EOS, kernels).sample(logits.to(device), ends_of(sequences))
    hosts = Sampler(EOS).sample(logits, ends_of(sequences))
    assert [row.token_id for row in mine] == [row.token_id for row in hosts]
    (own, other) = (mine[2].logprob, hosts[2].logprob)
    assert own is not None and other is not None and mine[1].logprob is None
    assert [token for token, _ in own.top] == [hosts[2].token_id, 149, 3, 0]
    assert [v for _, v in own.top] == pytest.approx([v for _, v in other.top], abs=1e-5)


def test_prompts_are_described_as_on_the_host(device: torch.device) -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    tokens = [0, 149, 7, 7, 3]
    backend = make_sampler(EOS, choose_kernels(device, torch.float32, "triton"))
    assert backend.describe(logits[:0].to(device), [], 3) == []
    for num_top in (0, 3, 400):
        found = backend.describe(logits.to(device), tokens, num_top)
        wanted = Sampler(EOS).describe(logits, tokens, num_top)
        for one, other in zip(found, wanted, strict=True):
            assert (one.token_id, one.rank) == (other.token_id, other.rank), f"{one}, {other}"
            assert one.logprob == pytest.approx(other.logprob, rel=1e-5, abs=1e-5)
            assert [i for i, _ in one.top] == [i for i, _ in other.top], f"{one}, {other}"


def test_the_likeliest_come_in_one_order(device: torch.device) -> None:
    logits = torch.tensor([[1.0, -0.0, 1.0, 0.0, -2.0, 5.0], [-1.0] * 6, [-math.inf] * 5 + [2.0]])
    ids, values = likeliest(logits.to(device), 5)
    assert ids.tolist() == [[5, 0, 2, 1, 3], [0, 1, 2, 3, 4], [5, 0, 1, 2, 3]]
    assert torch.equal(values.cpu(), logits.gather(1, ids.cpu()))
    many = torch.randn(70, 40, generator=torch.Generator().manual_seed(0)).round()
    ids, _ = likeliest(many.to(device), 3)
    assert torch.equal(ids.cpu(), many.sort(dim=-1, descending=True, stable=True).indices[:, :3])


def test_arrays_travel_in_one_copy(device: torch.device) -> None:
    kinds = [torch.float64, torch.int64, torch.float32, torch.int32, torch.bool]
    sent = [torch.arange(n, 2 * n).to(kind).numpy() for n, kind in enumerate(kinds)]
    tensors = upload(sent, device)
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1, "more than one buffer"
    assert all(t.storage_offset() * t.element_size() % 16 == 0 for t in tensors), "not aligned"
    for array, tensor, back in zip(sent, tensors, download(tensors), strict=True):
        assert tensor.device.type == device.type and array.dtype == back.dtype, f"{back.dtype}"
        assert array.tolist() == tensor.tolist() == back.tolist()


def test_an_engine_samples_with_the_kernels(tmp_path: Path, device: torch.device) -> None:
    """The tokens equal those of the torch set, whose engine samples on the host."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
    config = transformers.Qwen3MoeConfig(
        **TINY | sizes, head_dim=16, intermediate_size=48, moe_intermediate_size=24, num_experts=4
    )
    folder = str(write_checkpoint(tmp_path / "model", Case(config)))
    wishes = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, prompt_logprobs=1),
        "drawn": SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=2),
        "penalised": SamplingParams(temperature=0.8, seed=6, max_tokens=2, presence_penalty=1.0),
    }
    results = []
    for kernels in ("torch", "triton"):
        model = ModelConfig(path=folder, dtype="float32", device=device.type, kernels=kernels)
        engine = build_engine(EngineConfig(model=model, cache=CacheConfig(num_pages=12))).engine
        for name, params in wishes.items():
            engine.add(
                GenerationRequest(request_id=name, prompt_token_ids=(5, 9, 2, 8), params=params)
            )
        tokens: dict[str, list[int]] = {name: [] for name in wishes}
        prompt = []
        while engine.has_work:
            for delta in engine.step():
                assert delta.finish_reason in (None, FinishReason.LENGTH, FinishReason.STOP)
                tokens[delta.request_id] += delta.token_ids
                prompt += [entry.rank for entry in delta.prompt_logprobs or () if entry]
        results.append((tokens, prompt))
    assert results[0] == results[1], "another token than the torch set's"
