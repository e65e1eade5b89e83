"""The typed configuration: one frozen dataclass per component, each given only its own part.

`config_sources.py` fills it from the command line, the environment, a YAML file and these defaults,
in that order. Resolving an "auto" returns a new object (`dataclasses.replace`), never writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PAGE_SIZE = 16  # tokens in a KV page

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
KernelsName = Literal["auto", "native", "torch", "triton"]
CudaGraphsName = Literal["auto", "on", "off"]
DeviceName = Literal["auto", "cpu", "cuda"]
ExpertWeightsName = Literal["auto", "packed", "dequantised"]
MemoryPolicyName = Literal["lru", "frequency", "prefetch", "predicted"]
ReplicaPolicyName = Literal["round-robin", "fewest-activated", "least-tokens", "auto"]
RouterSide = Literal["auto", "attention", "experts"]
WireDtype = Literal["auto", "bf16", "fp8"]
BatchPolicyName = Literal["fifo", "balanced", "expert-aware"]
PredictorMode = Literal["off", "observe", "act"]
TransportName = Literal["auto", "host", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which checkpoint, and how it is held."""

    path: str | None = None  # a folder in Hugging Face layout; None: the demonstration model
    dtype: DtypeName = "auto"  # auto: the checkpoint's own
    device: DeviceName = "auto"  # auto: cuda if there is one
    kernels: KernelsName = "auto"  # auto: triton on a GPU, native on a CPU where it builds
    expert_weights: ExpertWeightsName = "auto"  # auto: packed where kernels can multiply them
    expert_memory_bytes: int | None = None  # of routed experts in a process; None: all of them
    expert_memory_policy: MemoryPolicyName = "frequency"  # what stays there, and what is read ahead
    max_model_len: int | None = None  # None: the checkpoint's context
    num_threads: int | None = None  # CPU threads for the math; None: torch's choice
    cuda_graphs: CudaGraphsName = "auto"  # auto: where a GPU has the triton kernels
    cuda_graph_max_rows: int | None = None  # None: scheduler.max_num_seqs


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How large the KV cache is (at most one of the two may be set), and whether it is shared."""

    num_pages: int | None = None
    memory_bytes: int | None = None  # None and None: enough for `max_num_seqs` average requests
    prefix_cache: bool = True  # requests reuse pages of equal beginnings


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How many sequences and tokens a step may hold, and how long the queue may grow."""

    max_num_seqs: int = 64
    max_batched_tokens: int = 1024
    max_queued_requests: int = 256
    batch_policy: BatchPolicyName = "fifo"  # who joins, and how a step is split
    max_passed_over: int = 128  # later requests that may start before one that waits
    max_passed_over_s: float = 5.0  # after which nobody passes it any more


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """How a step is cut into micro-batches."""

    micro_batches: int | Literal["auto"] = "auto"  # auto: 1 colocated, else by measured times
    ahead: bool = True  # ranks get their next step while one runs
    timeline: str | None = None  # a file: what every rank did when, as a Chrome trace

    @property
    def num_in_one_process(self) -> int:
        """Micro-batches where nothing can overlap: auto is 1."""
        return 1 if self.micro_batches == "auto" else self.micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Attention and expert ranks as processes of their own. 0 and 0: one process, no ranks."""

    attention_ranks: int = 0
    expert_ranks: int = 0
    attention_tp: int = 1  # processes of each attention rank, which share out its heads
    placement: str | None = None  # a file; None: contiguous
    replica_choice: ReplicaPolicyName = "round-robin"  # which copy of an expert serves a row
    router: RouterSide = "auto"  # where experts are chosen; auto: what moves fewer bytes
    wire_dtype: WireDtype = "auto"  # of rows on their way to the experts; auto: the model's
    transport: TransportName = "auto"  # of rows and sums; auto: nccl if each rank has its own GPU
    host: str = "127.0.0.1"  # ranks and coordinator listen here, nowhere else
    port: int = 0  # of the coordinator; 0: any
    heartbeat_s: float = 1.0  # a rank that misses three is replaced
    timeout_s: float = 30.0  # the longest that a rank waits for another one's rows
    start_timeout_s: float = 600.0  # until every rank has come and loaded its weights
    calibration: str | None = None  # a file of `moe-serve calibrate`; None: measured as it runs

    @property
    def is_disaggregated(self) -> bool:
        return self.attention_ranks > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorConfig:
    """What is known of the experts that coming tokens will choose."""

    path: str | None = None  # a folder of trained predictors; None: what requests chose so far
    mode: PredictorMode = "act"  # observe: measured, not followed
    min_recall: float = 0.2  # of the request predictor; below it, batches are fifo
    refresh_tokens: int = 32  # generated tokens after which a request is predicted again


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that the engine (offline or behind HTTP) needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Recording which experts the routers choose: `moe-serve trace start`."""

    directory: str | None = None  # each recording gets a folder there; None: nothing is recorded
    sample_rate: float = 0.01  # the share of requests; of those, every token
    tokens: bool = False  # also the token ids, from which a prompt can be read
    weights: bool = False  # also the routers' weights
    part_bytes: int = 16 * 1024 * 1024  # of one file of a recording
    max_bytes: int = 1024 * 1024 * 1024  # of one recording: then its oldest files are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None  # None: the checkpoint folder's name
    api_keys: tuple[str, ...] = ()  # empty: no key needed
    admin_keys: tuple[str, ...] = ()  # for /admin; empty: those routes are off
    max_body_bytes: int = 4 * 1024 * 1024
    drain_timeout_s: float = 30.0
    is_strict: bool = True  # unknown request fields: 400; else 200 and X-Ignored-Parameters
    sse_ping_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of `moe-serve serve`."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
