"""The control messages: one tagged msgpack union for each direction.

`Order`: the coordinator to a rank. `Report`: a rank to the coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from experts.memory.memory_stats import MemoryStats
from moe_serve.cluster.control.adapter_messages import AdapterLoaded, DropAdapter, LoadAdapter
from moe_serve.cluster.control.control_message import ControlMessage
from moe_serve.cluster.control.parcel_messages import (
    ParcelFacts,
    ParcelOrder,
    ParcelReport,
    ParcelSetup,
)
from moe_serve.cluster.control.placement_messages import (
    DropPlacement,
    RanksOf,
    Staged,
    StagePlacement,
    SwitchPlacement,
)
from moe_serve.cluster.control.probe import ProbeResult, ProbeTarget
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.drafting.draft import NO_PROPOSALS, Proposals
from moe_serve.engine.execute.step_outcome import RowFailure
from moe_serve.engine.opened_model import LoadReport
from moe_serve.engine.request.request import TokenLogprob
from moe_serve.engine.sampling.answer_masks import MaskCost
from moe_serve.engine.sampling.sampler import Sampled
from moe_serve.model.step_plan import LayerRange, RouteAsk
from moe_serve.pipeline.exchange.step_shape import RowsOfLayers


class Examine(ControlMessage, frozen=True):
    """Asks, before anything is loaded, which files the rank sees and which ports it reaches."""

    folder: str
    targets: Sequence[ProbeTarget]
    timeout_s: float


class Configure(ControlMessage, frozen=True):
    """Tells a rank what to load."""

    config: EngineConfig
    folder: str
    num_threads: int
    held: Mapping[int, Sequence[int]]  # layer -> experts; attention ranks hold none
    router_on_experts: bool
    is_recording: bool
    placement: int = 0  # the version that `held` belongs to
    num_slots: int = 0  # expert slots for all layers, if experts may move; 0: they stay
    arena: str = ""  # path of the memory tier; empty: none
    parcels: ParcelSetup | None = None  # attention ranks of a server with cells
    adapters: Sequence[LoadAdapter] = ()


class Join(ControlMessage, frozen=True):
    """Tells a rank to meet the other members of a new epoch. It ends the epoch before."""

    epoch: int
    attention_ranks: Sequence[str]
    expert_ranks: Sequence[str]
    store_host: str
    store_port: int
    ranks_of: RanksOf
    placement: int = 0  # its version, also while ranks stand in for lost ones


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, start + count) of a sequence; its page table from `first_page` on is new. The
    last of these tokens may be drafted: only they are sent, as the rank knows the others."""

    sequence_id: int
    start: int
    count: int
    num_logits: int
    first_page: int
    pages: Sequence[int]
    drafted: bytes = b""  # int32, little-endian
    layers: LayerRange | None = None  # None: all
    num_dropped: int = 0  # tokens that the page table lacks in its middle


class OpenSequence(msgspec.Struct, frozen=True, array_like=True):
    """The facts of a sequence that a sampler needs. Tokens are int32, little-endian."""

    sequence_id: int
    prompt: bytes
    output: bytes
    params: msgspec.Raw  # SamplingParams and DecodingRules, see `pack_params`
    choice: int
    seed: int
    adapter: int = 0  # its number; 0: the base model


class PageWork(msgspec.Struct, frozen=True, array_like=True):
    """Pages to zero, then pages to copy. `save`, `load`: to and from slots of the memory tier."""

    clear: Sequence[int] = ()
    copy: Sequence[tuple[int, int]] = ()  # (from, to)
    save: Sequence[tuple[int, int]] = ()  # (page, slot)
    load: Sequence[tuple[int, int]] = ()  # (slot, page)


class RunStep(ControlMessage, frozen=True):
    """Tells an attention rank to run a step. `rows`, `some_layers`: see `StepShape`. `after`: a
    step that had not ended when this was sent; this one continues with its tokens, and fails if
    that step failed on this rank."""

    epoch: int
    step: int
    rows: Sequence[Sequence[int]]
    micro_batches: Sequence[Sequence[Slice]]
    opened: Sequence[OpenSequence]
    closed: Sequence[int]
    page_work: Sequence[PageWork]
    after: int = 0
    routes: RouteAsk | None = None
    placement: int = 0  # a rank with another version ends
    some_layers: Sequence[Sequence[Sequence[RowsOfLayers]]] = ()
    parked: Sequence[int] = ()  # see `StepPlan`
    num_guesses: int = 0  # likewise


class ServeStep(ControlMessage, frozen=True):
    """Tells an expert rank how many rows each attention rank will send and, where it has an expert
    memory, which experts these will probably need (`choice_packing.py`)."""

    epoch: int
    step: int
    rows: Sequence[Sequence[int]]
    needed: bytes = b""
    placement: int = 0  # a rank with another version ends
    some_layers: Sequence[Sequence[Sequence[RowsOfLayers]]] = ()


class QueryPages(ControlMessage, frozen=True):
    """Asks for this page work, and then which pages hold only finite values."""

    page_work: Sequence[PageWork]
    pages: Sequence[int]


class TakeExperts(ControlMessage, frozen=True):
    """Tells an expert rank to load these experts too: layer -> experts."""

    experts: Mapping[int, Sequence[int]]


class DropExperts(ControlMessage, frozen=True):
    """Tells an expert rank to keep only the experts first configured."""


class Stop(ControlMessage, frozen=True):
    """Tells a rank to exit."""


class FileMark(msgspec.Struct, frozen=True, array_like=True):
    """The name, size and digest of a checkpoint file, as a rank sees it."""

    name: str
    size: int
    digest: str


class Hello(ControlMessage, frozen=True):
    """The first message of a rank."""

    name: str
    pid: int
    host: str
    versions: Mapping[str, str]
    probe_port: int = 0  # other ranks try it; open until the rank is configured


class Examined(ControlMessage, frozen=True):
    """The answer to Examine. A `why` that is not empty says why the files could not be read."""

    files: Sequence[FileMark]
    probes: Sequence[ProbeResult]
    why: str | None = None


class Loading(ControlMessage, frozen=True):
    """Loading progress in tensors read: of the model's, and at the end of the rank's own."""

    done: int
    total: int


class Loaded(ControlMessage, frozen=True):
    """The rank is ready to join. `weights_hash` is the checkpoint's."""

    weights_hash: str
    report: LoadReport
    load_seconds: float
    gpu: str = ""  # its id, if NCCL reaches it
    parcels: ParcelFacts | None = None  # of attention ranks that take part in them


class Joined(ControlMessage, frozen=True):
    """Reports that the rank is in the epoch's data group. A `why` that is not empty says why it is
    not.
    """

    epoch: int
    why: str | None = None


class StageSeconds(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that a rank's step spent computing, waiting for others, and in all."""

    busy: float = 0.0
    waiting: float = 0.0
    whole: float = 0.0


class Choices(msgspec.Struct, frozen=True, array_like=True):
    """The routers' choices for some slices of a step: `StepChoices`, its arrays little-endian."""

    sequence_ids: Sequence[int]
    counts: Sequence[int]
    num_layers: int
    top_k: int
    is_wide: bool  # int16 ids, not uint8
    expert_ids: bytes
    weights: bytes = b""  # float16; empty: not asked for


class StepDone(ControlMessage, frozen=True):
    """The tokens of an attention rank's step, by sequence id. See `StepOutcome`."""

    epoch: int
    step: int
    sampled: Mapping[int, tuple[Sampled, ...]]
    failures: Mapping[int, RowFailure]
    prompt_logprobs: Mapping[int, Sequence[TokenLogprob]]
    seconds: StageSeconds
    records: bytes = b""  # timeline records
    choices: Choices | None = None
    mask_costs: Mapping[int, MaskCost] = {}
    spoiled: Sequence[int] = ()
    proposals: Proposals = NO_PROPOSALS


class StepServed(ControlMessage, frozen=True):
    """An expert rank has finished a step. `failure` is the error that a layer raised, if any."""

    epoch: int
    step: int
    failure: str | None
    seconds: StageSeconds
    records: bytes = b""
    memory: MemoryStats | None = None  # set where the rank has an expert memory


class StepFailed(ControlMessage, frozen=True):
    """A step failed on this rank. `peer`: the lost rank that caused it; None: computing raised."""

    epoch: int
    step: int
    why: str
    peer: str | None


class FinitePages(ControlMessage, frozen=True):
    """The answer to QueryPages."""

    is_finite: Sequence[bool]


class TookExperts(ControlMessage, frozen=True):
    """The answer to TakeExperts and DropExperts. A `why` that is not empty says why it failed."""

    why: str | None = None


class Heartbeat(ControlMessage, frozen=True):
    """The rank is alive. `step`: the last one begun; `clock_ns`: its time.perf_counter_ns().
    `operation`: the current one, begun `operation_s` ago; empty between steps."""

    step: int
    clock_ns: int
    operation: str = ""
    operation_s: float = 0.0


class Unwell(ControlMessage, frozen=True):
    """The rank exits for a reason that the user can act on."""

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
    | ParcelOrder
    | LoadAdapter
    | DropAdapter
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
    | ParcelReport
    | AdapterLoaded
    | Heartbeat
    | Unwell
)
