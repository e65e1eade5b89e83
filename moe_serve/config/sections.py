"""The typed configuration: one frozen dataclass per component, each given only its own part.

`sources.py` fills it from the command line, the environment, a YAML file and these defaults, in
that order. Resolving an "auto" returns a new object (`dataclasses.replace`) and never writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.config.cells import CellsConfig
from moe_serve.config.event_config import KVEventsConfig
from moe_serve.config.tiers import TierConfig

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
PageSize = Literal[8, 16, 32, 64, 128]
KVDtypeName = Literal["auto", "int8", "int4"]
KernelsName = Literal["auto", "native", "torch", "triton"]
CudaGraphsName = Literal["auto", "on", "off"]
DeviceName = Literal["auto", "cpu", "cuda"]
WeightsName = Literal["auto", "packed", "dequantised"]
LowBitProductsName = Literal["exact", "int8"]
MemoryPolicyName = Literal["lru", "frequency", "prefetch", "predicted", "next-layer"]
ReplicaPolicyName = Literal["round-robin", "fewest-activated", "least-tokens", "lp", "auto"]
RouterSide = Literal["auto", "attention", "experts"]
WireDtype = Literal["auto", "bf16", "fp8"]
BatchPolicyName = Literal["fifo", "balanced", "expert-aware"]
OrderName = Literal["auto", "fifo", "priority", "edf", "atc"]
PreemptName = Literal["memory", "deadline"]
LateName = Literal["keep", "demote"]
LayeredPrefillName = Literal["auto", "on", "off"]
StepBudgetName = Literal["auto", "fixed", "slack"]
SwitchName = Literal["off", "on"]
PredictorMode = Literal["off", "observe", "act"]
SpeculationMethod = Literal["off", "auto", "ngram", "suffix", "head", "mtp", "self"]
TransportName = Literal["auto", "host", "nccl"]
RebalanceName = Literal["off", "manual", "auto"]
ToolParserName = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "glm47",
    "gpt-oss",
    "hermes",
    "mistral",
    "openai",
    "qwen3",
    "qwen3_coder",
    "qwen3_xml",
]
ReasoningParserName = Literal[
    "auto",
    "none",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "gpt-oss",
    "mistral",
    "openai_gptoss",
    "qwen3",
]
RebalanceObjective = Literal["auto", "tokens", "activated"]
MetricsAlias = Literal["none", "vllm"]
OverloadStatus = Literal[429, 503]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The checkpoint, and how it is held in memory."""

    path: str | None = None  # a folder, or a name on a hub; None: the demonstration model
    merge_adapter: str | None = None  # folder of an adapter to merge into it at the start
    max_merged_models: int = 3  # in the cache; those used longest ago are deleted
    dtype: DtypeName = "auto"  # auto: the checkpoint's own
    device: DeviceName = "auto"  # auto: cuda if there is one
    kernels: KernelsName = "auto"  # auto: triton on a GPU, native on a CPU where it builds
    expert_weights: WeightsName = "auto"  # auto: packed where kernels can multiply them
    linear_weights: WeightsName = "auto"  # the same of attention's projections and the head
    low_bit_products: LowBitProductsName = "exact"  # int8: activations are quantised as well
    expert_memory_bytes: int | None = None  # for routed experts, per process; None: all experts
    expert_memory_policy: MemoryPolicyName = "frequency"  # which experts stay and are read ahead
    max_model_len: int | None = None  # None: the checkpoint's context
    num_threads: int | None = None  # CPU threads for the math; None: torch's choice
    cuda_graphs: CudaGraphsName = "auto"  # auto: where a GPU has the triton kernels
    cuda_graph_max_rows: int | None = None  # None: scheduler.max_num_seqs


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The size of the KV cache (at most one of `num_pages` and `memory_bytes` may be set), and
    whether prefixes are shared."""

    page_size: PageSize = 16  # tokens in a page
    num_pages: int | None = None
    memory_bytes: int | None = None  # None and None: enough for `max_num_seqs` average requests
    prefix_cache: bool = True  # requests reuse pages of equal beginnings
    kv_dtype: KVDtypeName = "auto"  # of keys and values; auto: the model's own
    metrics_sample: float = 0.01  # share of pages whose times are measured; 0: none
    disk_path: str | None = None  # a folder for pages that survive a restart; None: no disk tier
    disk_bytes: int = 10 * 2**30  # most that the folder takes
    disk_min_free_bytes: int = 2**30  # space of the disk that is left to others
    disk_write_bytes_per_day: int | None = None  # None: any number
    disk_ttl_s: float = 86400.0  # how long a page is kept
    disk_key_file: str | None = None  # 32 bytes that encrypt the folder's pages; None: plain pages
    memory_tier_bytes: int | None = None  # shared by the ranks of a host; None: no memory tier
    checkpoint_after_s: float = 2.0  # how often running requests give their pages
    share_across_keys: bool = False  # API keys share pages, also with a disk tier
    allow_kv_window: bool = False  # requests may forget the middle of their context

    @property
    def separates_keys(self) -> bool:
        """True if requests with different API keys share no pages: the disk keeps pages for so
        long that response times would tell one client what others have asked."""
        return self.disk_path is not None and not self.share_across_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits on the sequences and tokens of a step, and on the queue."""

    max_num_seqs: int = 64
    max_batched_tokens: int = 1024
    max_queued_requests: int = 256
    batch_policy: BatchPolicyName = "fifo"  # chooses the requests that start, and splits a step
    expert_capacity: int = 1  # rows per expert that a split counts; further rows are free
    max_passed_over: int = 128  # later requests that may start before one that waits
    max_passed_over_s: float = 5.0  # waiting time that ends overtaking and adds 1 to priority
    max_held_s: float = 1.0  # how long a costly grammar may hold an idle seat that others need
    tiers: tuple[TierConfig, ...] = ()  # service tiers by name, the default one first
    order: OrderName = "auto"  # which request starts first; auto: atc with tiers, else priority
    patience_s: float = 2.0  # atc: how far ahead of its deadline a request becomes urgent
    max_wait_s: float = 90.0  # a request that waited longer goes first, whatever its tier
    late: LateName = "keep"  # demote: requests that cannot meet their target go last
    preempt: PreemptName = "memory"  # deadline: also for an urgent request when seats are full
    step_budget: StepBudgetName = "auto"  # prefill of a step; auto: slack if a tier sets tpot_s
    min_prefill_tokens: int = 64  # least prefill of a step, however little slack there is
    length_prediction: SwitchName = "off"  # learns how long answers will be; needs scikit-learn
    layered_prefill: LayeredPrefillName = "auto"  # long prompts pass groups of layers, not chunks
    parked_bytes: int = 64 * 2**20  # states of a prompt between two groups, per attention rank


DEFAULT_SCHEDULER = SchedulerConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """The split of a step into micro-batches."""

    micro_batches: int | Literal["auto"] = "auto"  # auto: 1 colocated, else by measured times
    ahead: bool = True  # ranks get the next step while one runs
    timeline: str | None = None  # a file for a Chrome trace of every rank's stages

    @property
    def num_in_one_process(self) -> int:
        """Number of micro-batches in one process, where stages cannot overlap: "auto" is 1."""
        return 1 if self.micro_batches == "auto" else self.micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Attention and expert ranks as separate processes. 0 and 0: one process, no ranks."""

    attention_ranks: int = 0
    expert_ranks: int = 0
    attention_tp: int = 1  # processes per attention rank, among which its heads are split
    placement: str | None = None  # a file; None: contiguous
    replica_choice: ReplicaPolicyName = "round-robin"  # which copy of an expert serves a row
    rebalance: RebalanceName = "off"  # move experts while serving: on request, or automatically
    rebalance_interval_s: float = 300.0  # seconds between two plans
    rebalance_objective: RebalanceObjective = "auto"  # the load to even out; auto: by rows per step
    rebalance_min_gain: float = 0.05  # least predicted gain, as a share of the busiest rank's work
    rebalance_max_moves: int = 8  # most expert copies per layer that one plan may move
    rebalance_bytes_per_s: int = 64 * 1024 * 1024  # read rate of a move, per expert rank
    rebalance_spare_slots: int = 0  # extra copies that a rank may have in each layer
    router: RouterSide = "auto"  # where experts are chosen; auto: the side that moves fewer bytes
    wire_dtype: WireDtype = "auto"  # of rows sent to the experts; auto: the model's dtype
    transport: TransportName = "auto"  # for rows and sums; auto: nccl if each rank has its own GPU
    host: str = "127.0.0.1"  # address on which ranks and coordinator listen
    port: int = 0  # of the coordinator; 0: any free port
    heartbeat_s: float = 1.0  # heartbeat interval; a rank that misses three is replaced
    timeout_s: float = 30.0  # longest wait for another rank's rows
    start_timeout_s: float = 600.0  # time for every rank to connect and load its weights
    rejoin_s: float = 120.0  # how long a node of a launch tries to reach a lost node 0
    calibration: str | None = None  # a file of `moe-serve calibrate`; None: measured as it runs

    @property
    def is_disaggregated(self) -> bool:
        return self.attention_ranks > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorConfig:
    """The predictor of the experts that coming tokens will choose."""

    path: str | None = None  # a folder of trained predictors; None: use past choices
    mode: PredictorMode = "act"  # observe: measured but not followed
    min_recall: float = 0.2  # a predictor below it is not followed: batches are fifo
    refresh_tokens: int = 32  # generated tokens after which a request is predicted again
    learn: bool = False  # adapt a shift per expert to the requests' choices, in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Drafted tokens, of which a step verifies several. They never change an answer."""

    method: SpeculationMethod = "auto"  # the drafters; auto: all that cost nothing
    max_tokens: int = 16  # most drafted tokens of a request in one step
    is_adaptive: bool = True  # only drafts that measured times show to pay; else all
    prompt_lookup_min: int = 2  # least tokens that must agree in a request's own text
    prompt_lookup_max: int = 5  # most tokens that are compared there
    suffix_max_tokens: int = 1_000_000  # tokens of past answers that are kept, in all
    self_experts: int = 2  # experts of a token while the model drafts for itself (method self)
    head: str | None = None  # a folder; None: speculation_head in the model's folder

    @property
    def is_on(self) -> bool:
        return self.method != "off"

    @property
    def num_guesses(self) -> int:
        """The most tokens that a network guesses for a sequence in a step; 0: there is no
        network."""
        return min(self.max_tokens, {"head": 4, "mtp": 4, "self": 5}.get(self.method, 0))

    @property
    def drafters(self) -> tuple[str, ...]:
        """The sources of drafts that the method uses; empty if it is off."""
        sources = {
            "off": (),
            "ngram": ("ngram", "prediction"),
            "suffix": ("ngram", "suffix", "prediction"),
            "auto": ("ngram", "suffix", "prediction", "grammar"),
            "head": ("ngram", "prediction", "grammar", "head"),
            "mtp": ("ngram", "prediction", "grammar", "mtp"),
            "self": ("ngram", "prediction", "grammar", "self"),
        }
        return sources[self.method]

    @property
    def summary(self) -> str:
        """The method, its drafters and the limit in one line."""
        return f"{self.method}: {', '.join(self.drafters)}; at most {self.max_tokens} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that the engine (offline or behind HTTP) needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    cells: CellsConfig = field(default_factory=CellsConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Recording of the experts that the routers choose: `moe-serve trace start`."""

    directory: str | None = None  # each recording gets a folder there; None: nothing is recorded
    sample_rate: float = 0.01  # share of requests; each with all its tokens
    tokens: bool = False  # also token ids, which reveal the prompts
    weights: bool = False  # also the routers' weights
    part_bytes: int = 16 * 1024 * 1024  # size of one file of a recording
    max_bytes: int = 1024 * 1024 * 1024  # of all recordings; the oldest files are deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None  # None: the checkpoint folder's name
    api_keys: tuple[str, ...] = ()  # empty: no key needed
    admin_keys: tuple[str, ...] = ()  # for /admin; empty: these routes are off
    max_body_bytes: int = 4 * 1024 * 1024
    drain_timeout_s: float = 30.0
    is_strict: bool = True  # unknown request fields: 400; else 200 and X-Ignored-Parameters
    sse_ping_s: float = 15.0
    expert_metrics: bool = False  # /metrics has a series for each expert of each layer
    request_metrics: bool = False  # chats and completions return their times in `metrics`
    force_include_usage: bool = False  # every stream of chats and completions returns its usage
    tokenizer_info: bool = False  # GET /tokenizer_info returns tokenizer and chat template
    max_stored_responses: int = 1000  # for /v1/responses; 0: none are kept
    stored_responses_bytes: int = 64 * 1024 * 1024  # in all
    stored_response_ttl_s: float = 3600.0
    metrics_alias: MetricsAlias = "none"  # additional names in /metrics
    otlp_traces_endpoint: str | None = None  # a collector of OpenTelemetry; None: no traces
    tool_parser: ToolParserName = "auto"  # how the model writes calls; auto: as its template does
    reasoning_parser: ReasoningParserName = "auto"  # how it marks its reasoning
    grammar_in_reasoning: bool = False  # structured output holds from the first token
    api_key_file: str | None = None  # more API keys, one per line; reread when it changes
    key_max_concurrent: int | None = None  # open sequences per API key; None: any number
    key_requests_per_minute: int | None = None  # per API key
    key_tokens_per_minute: int | None = None  # per API key, prompts and answers
    key_min_priority: int = 0  # the most urgent that a request may be; lower is more urgent
    key_tiers: tuple[str, ...] = ()  # tiers that a request may name, the default first; empty: all
    key_may_tighten: bool = False  # requests may ask for tighter targets than their tier's
    allow_open: bool = False  # serve other machines without any API key
    allowed_hosts: tuple[str, ...] = ()  # besides loopback names, in the Host header
    cors_origins: tuple[str, ...] = ()  # web pages that may call the server; empty: none
    overload_status: OverloadStatus = 429
    ssl_certfile: str | None = None  # PEM; None: plain HTTP
    ssl_keyfile: str | None = None  # PEM; None: the key is in ssl_certfile
    ssl_ca_certs: str | None = None  # PEM; clients must show a certificate of these authorities
    hang_report_s: float = 60.0  # time without progress, with pending work, before a report
    hang_report_directory: str | None = None  # None: the system's folder for temporary files

    @property
    def has_api_keys(self) -> bool:
        """True if requests need an API key."""
        return bool(self.api_keys) or self.api_key_file is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The log on standard error."""

    format: LogFormat = "text"  # json: one object per line
    level: LogLevel = "warning"
    access: bool = False  # a line for each HTTP request
    access_exclude: tuple[str, ...] = ("/health", "/metrics", "/ping")  # path prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of `moe-serve serve`."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    log: LogConfig = field(default_factory=LogConfig)
