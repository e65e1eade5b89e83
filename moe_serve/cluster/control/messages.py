"""What coordinator and ranks say to each other: one tagged msgpack union for each direction.

`Order`: what the coordinator tells a rank. `Report`: what a rank tells the coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from experts.memory.memory_stats import MemoryStats
from moe_serve.cluster.control.probe import ProbeResult, ProbeTarget
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.execute.step_executor import RowFailure
from moe_serve.engine.request.request import TokenLogprob
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.answer_masks import MaskCost
from moe_serve.engine.sampling.sampler import Sampled
from moe_serve.model.step_plan import RouteAsk

RanksOf = Mapping[int, Sequence[Sequence[int]]]  # layer -> expert -> expert ranks of the epoch


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Fields in order, without their names."""


class Examine(_Message, frozen=True):
    """Before anything is loaded: which files, and whose ports, does this rank see?"""

    folder: str
    targets: Sequence[ProbeTarget]
    timeout_s: float


class Configure(_Message, frozen=True):
    """What to load."""

    config: EngineConfig
    folder: str
    num_threads: int
    held: Mapping[int, Sequence[int]]  # layer -> experts; attention ranks hold none
    router_on_experts: bool
    is_recording: bool
    placement: int = 0  # the version that `held` is of
    num_slots: int = 0  # for experts of all layers, where they may be exchanged; 0: they stay


class Join(_Message, frozen=True):
    """Meet the others in a new epoch. Everything of the old one is void."""

    epoch: int
    attention_ranks: Sequence[str]
    expert_ranks: Sequence[str]
    store_host: str
    store_port: int
    ranks_of: RanksOf
    placement: int = 0  # the version that it is of, whoever stands in for others


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, start + count) of a sequence; its page table from `first_page` on is new."""

    sequence_id: int
    start: int
    count: int
    num_logits: int
    first_page: int
    pages: Sequence[int]


class OpenSequence(msgspec.Struct, frozen=True, array_like=True):
    """What a sampler must know of a sequence. Tokens are int32, little-endian."""

    sequence_id: int
    prompt: bytes
    output: bytes
    params: msgspec.Raw  # of SamplingParams, see `pack_params`
    choice: int
    seed: int


def pack_params(params: SamplingParams) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(params, enc_hook=dict))  # a frozen mapping


def unpack_params(packed: msgspec.Raw) -> SamplingParams:
    return msgspec.msgpack.decode(packed, type=SamplingParams)


class PageWork(msgspec.Struct, frozen=True, array_like=True):
    """Pages to zero, and then pages to copy, (from, to) each."""

    clear: Sequence[int]
    copy: Sequence[tuple[int, int]]


class RunStep(_Message, frozen=True):
    """To an attention rank. `rows`: of its micro-batches, in all attention ranks of the epoch.

    `after`: it was sent before that step had ended, and goes on with its tokens: if nothing came
    of that step here, nothing can come of this one."""

    epoch: int
    step: int
    rows: Sequence[Sequence[int]]
    micro_batches: Sequence[Sequence[Slice]]
    opened: Sequence[OpenSequence]
    closed: Sequence[int]
    page_work: Sequence[PageWork]
    after: int = 0
    routes: RouteAsk | None = None
    placement: int = 0  # the rank has this version, or ends


class ServeStep(_Message, frozen=True):
    """To an expert rank: who will send how many rows, and which experts these will probably need
    (`needed_experts.py`; for who has an expert memory)."""

    epoch: int
    step: int
    rows: Sequence[Sequence[int]]
    needed: bytes = b""
    placement: int = 0  # the rank has this version, or ends


class QueryPages(_Message, frozen=True):
    """Do this work, then say which pages hold nothing but finite values."""

    page_work: Sequence[PageWork]
    pages: Sequence[int]


class TakeExperts(_Message, frozen=True):
    """Load these too: layer -> experts."""

    experts: Mapping[int, Sequence[int]]


class DropExperts(_Message, frozen=True):
    """Keep only what was first configured."""


class StagePlacement(_Message, frozen=True):
    """Make ready for another placement beside the steps, and say so. All of it is of the layers
    that change: `held` and what of it is to be read are this rank's, none of an attention rank."""

    placement: int
    ranks_of: RanksOf
    held: Mapping[int, Sequence[int]]
    gained: Mapping[int, Sequence[int]]
    bytes_per_s: float


class DropPlacement(_Message, frozen=True):
    """What was staged does not come."""


class SwitchPlacement(_Message, frozen=True):
    """What was staged counts from the next step on."""

    placement: int


class Stop(_Message, frozen=True):
    """Leave."""


class FileMark(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint's file as a rank sees it."""

    name: str
    size: int
    digest: str


class Hello(_Message, frozen=True):
    """The first message of a rank."""

    name: str
    pid: int
    host: str
    versions: Mapping[str, str]
    probe_port: int = 0  # open until it is configured, for others to try


class Examined(_Message, frozen=True):
    """The answer to Examine; `why`: the files could not be read."""

    files: Sequence[FileMark]
    probes: Sequence[ProbeResult]
    why: str | None = None


class Loading(_Message, frozen=True):
    """Progress: tensors read, of the model's; at the end, of those that the rank has."""

    done: int
    total: int


class Loaded(_Message, frozen=True):
    """Ready to join. The hash is that of the weights; attention ranks have pages."""

    weights_hash: str
    num_pages: int
    kv_bytes: int
    kernels: str
    dtype: str
    device: str
    weight_format: str
    expert_weights: str
    load_seconds: float
    gpu: str = ""  # which, if NCCL reaches it


class Joined(_Message, frozen=True):
    """In the epoch's data group; or `why` not."""

    epoch: int
    why: str | None = None


class StageSeconds(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank's step went, in seconds: computing, waiting for others, and from end to end."""

    busy: float = 0.0
    waiting: float = 0.0
    whole: float = 0.0


class Choices(msgspec.Struct, frozen=True, array_like=True):
    """What routers chose for some slices of a step: `StepChoices`, its arrays little-endian."""

    sequence_ids: Sequence[int]
    counts: Sequence[int]
    num_layers: int
    top_k: int
    is_wide: bool  # int16 ids, not uint8
    expert_ids: bytes
    weights: bytes = b""  # float16; none: not asked for


class StepDone(_Message, frozen=True):
    """An attention rank's tokens, by sequence id."""

    epoch: int
    step: int
    sampled: Mapping[int, Sampled]
    failures: Mapping[int, RowFailure]
    prompt_logprobs: Mapping[int, Sequence[TokenLogprob]]
    seconds: StageSeconds
    records: bytes = b""  # of the timeline
    choices: Choices | None = None
    mask_costs: Mapping[int, MaskCost] = {}


class StepServed(_Message, frozen=True):
    """An expert rank's end of a step; `failure`: a layer of it raised."""

    epoch: int
    step: int
    failure: str | None
    seconds: StageSeconds
    records: bytes = b""
    memory: MemoryStats | None = None  # of its experts, where they need not all be in memory


class StepFailed(_Message, frozen=True):
    """The step failed here. `peer`: because that rank was lost; None: computing it raised."""

    epoch: int
    step: int
    why: str
    peer: str | None


class FinitePages(_Message, frozen=True):
    """The answer to QueryPages."""

    is_finite: Sequence[bool]


class TookExperts(_Message, frozen=True):
    """The answer to TakeExperts and DropExperts; or `why` not."""

    why: str | None = None


class Staged(_Message, frozen=True):
    """Ready for a placement, after so many bytes; or `why` not."""

    placement: int
    num_bytes: int = 0
    why: str | None = None


class Heartbeat(_Message, frozen=True):
    """Still here; `step`: the last one begun, `clock_ns`: time.perf_counter_ns() there.

    `operation`: what it is at, for so many seconds; empty between steps."""

    step: int
    clock_ns: int
    operation: str = ""
    operation_s: float = 0.0


class Unwell(_Message, frozen=True):
    """The rank leaves, for a reason that its user can act on."""

    why: str


Order = (
    Examine
    | Configure
    | Join
    | RunStep
    | ServeStep
    | QueryPages
    | TakeExperts
    | DropExperts
    | StagePlacement
    | DropPlacement
    | SwitchPlacement
    | Stop
)
Report = (
    Hello
    | Examined
    | Loading
    | Loaded
    | Joined
    | StepDone
    | StepFailed
    | StepServed
    | FinitePages
    | TookExperts
    | Staged
    | Heartbeat
    | Unwell
)
