"""Opens the checkpoint that an engine serves, in the engine's process or on a rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moe_kernels.interface.kv_form import FLOATS, KVForm
from moe_kernels.kernel_choice import kernels_build
from moe_serve.adapters.adapter_build import is_merging
from moe_serve.adapters.adapter_size import configured_bytes, reserved_bytes
from moe_serve.cache.kv_cache import KVCache, checked_kv_form, num_pages
from moe_serve.cache.page_bytes import page_geometry
from moe_serve.cache.page_key import model_identity
from moe_serve.config.sections import EngineConfig, ModelConfig
from moe_serve.engine.memory.free_memory import free_bytes
from moe_serve.engine.request.sequence import StopRule
from moe_serve.engine.sampling.grammar.grammars import Grammars
from moe_serve.engine.sampling.grammar.vocabulary import read_vocabulary
from moe_serve.errors import CheckpointError, ConfigError
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.model.checkpoint.hf_config import HFConfig, generation_eos_token_ids
from moe_serve.model.families import FAMILIES, family_of
from moe_serve.model.families.mtp import MTPLayer
from moe_serve.model.hub.hub_name import hub_hint
from moe_serve.model.load.load_mtp import MTPLoader
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.load.weight_reader import LoadProgress, OpenWeights, open_checkpoint
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.stage.gather import Gather
from moe_serve.model.stage.mtp_stage import MTPPart
from moe_serve.regular_file import is_there


def model_folder(config: ModelConfig) -> Path:
    """Returns the checkpoint's folder. Raises CheckpointError if it is missing or incomplete."""
    folder = demo_model_folder() if config.path is None else Path(config.path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder: give a local checkpoint in Hugging Face layout "
            f"(config.json, *.safetensors, tokenizer.json){hub_hint(config.path or '')}."
        )
    if not is_there(folder / "config.json"):
        raise CheckpointError(
            f"{folder} has no config.json: give the folder of a checkpoint in Hugging Face layout."
        )
    return folder


def device_of(config: ModelConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device is 'cuda', but torch finds no CUDA GPU here: use 'cpu' or 'auto'."
        )
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The form in which a process holds the model. Expert ranks have no pages."""

    kernels: str
    num_threads: int
    dtype: str
    device: str
    weight_format: str  # in the checkpoint
    expert_weights: str  # how a quantised checkpoint's weights are held
    num_pages: int = 0
    kv_bytes: int = 0
    kv_dtype: str = "auto"  # of the pages; auto: `dtype`
    page_bytes: int = 0  # of a page: in this process, or of all shards of an attention rank
    page_geometry: str = ""  # digest of its shapes
    build: str = ""  # of the kernels: bits may differ between two builds


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """The attention stage and the cache that it writes to."""

    stage: AttentionStage
    cache: KVCache
    num_pages: int
    kv_bytes: int
    mtp: MTPPart | None = None  # the layer that drafts, if it is configured

    @property
    def kv_dtype(self) -> str:
        return self.cache.form.name


def kv_bytes_per_token(
    spec: ModelSpec, mtp: MTPLayer | None, itemsize: int, form: KVForm = FLOATS
) -> int:
    """Returns the bytes of one token in the KV cache, over all layers, including the one that
    drafts."""
    own = 0 if mtp is None else mtp.spec.kv_bytes_per_token(itemsize, form)
    return spec.kv_bytes_per_token(itemsize, form) + own


@dataclass(frozen=True, slots=True)
class ServedCheckpoint:
    """A checkpoint's folder and spec, and the configuration that serves it. No weights are open."""

    folder: Path
    config: ModelConfig
    spec: ModelSpec

    @classmethod
    def read(cls, config: ModelConfig) -> ServedCheckpoint:
        """Reads config.json. Raises CheckpointError."""
        folder = model_folder(config)
        hf_config = HFConfig.read(folder)
        return ServedCheckpoint(folder, config, family_of(hf_config).read_spec(hf_config.text()))

    @property
    def max_model_len(self) -> int:
        """The configured maximum, or the model's own. Raises ConfigError."""
        wanted, most = self.config.max_model_len, self.spec.max_positions
        if wanted is None:
            return most
        if not 2 <= wanted <= most:
            raise ConfigError(
                f"max_model_len ({wanted}) must be in [2, {most}], the model's context."
            )
        return wanted

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids of generation_config.json, or else of config.json. Raises CheckpointError."""
        ids = frozenset(generation_eos_token_ids(self.folder) or self.spec.eos_token_ids)
        if ids and max(ids) >= self.spec.vocab_size:
            raise CheckpointError(
                f"{self.folder / 'generation_config.json'}: eos_token_id {max(ids)} is outside the "
                f"vocabulary of {self.spec.vocab_size} tokens."
            )
        return ids

    @property
    def stop_rule(self) -> StopRule:
        return StopRule(self.eos_token_ids, self.max_model_len)

    def mtp_layer(self, config: EngineConfig) -> MTPLayer | None:
        """Returns the checkpoint's own layer that drafts, if `config` wants it.

        Raises ConfigError or CheckpointError if it cannot be used. Its weights may be missing.
        """
        if config.speculation.method != "mtp":
            return None
        device, num_shards = device_of(self.config), config.cluster.attention_tp
        if device.type != "cpu" or num_shards > 1:
            raise ConfigError(
                "speculation.method is 'mtp', which runs on CPUs with cluster.attention_tp 1, but "
                f"the device is {device} and attention_tp is {num_shards}: use 'auto'."
            )
        hf_config = HFConfig.read(self.folder)
        family = family_of(hf_config)
        if family.read_mtp is None:
            known = ", ".join(each.name for each in FAMILIES if each.read_mtp is not None)
            raise ConfigError(
                f"speculation.method is 'mtp', but the MTP layers of {family.name} are not known, "
                f"only those of {known}: use 'auto' or 'off'."
            )
        return family.read_mtp(hf_config.text(), family.names, self.spec)

    def grammars(self) -> Grammars:
        """Returns the model's grammars. The tokenizer is read at the first constraint."""
        folder, size, eos = self.folder, self.spec.vocab_size, self.eos_token_ids
        return Grammars(lambda: read_vocabulary(folder, size, eos))

    def page_identity(self, report: LoadReport) -> bytes:
        """Returns the identity that cached pages belong to: the weights, how they are computed, and
        the form of the pages."""
        return model_identity(
            self.folder, report.dtype, report.kernels, report.expert_weights, report.kv_dtype
        )


@dataclass(frozen=True, slots=True)
class OpenedModel(ServedCheckpoint):
    """A checkpoint with its weights open: every header is checked, and no tensor is read yet."""

    loader: ModelLoader
    num_threads: int  # of this process

    @classmethod
    def open(
        cls,
        folder: Path,
        config: ModelConfig,
        num_threads: int,
        device: torch.device,
        progress: LoadProgress | None = None,
        open_weights: OpenWeights = open_checkpoint,
    ) -> OpenedModel:
        """Raises CheckpointError, and ConfigError for kernels that this machine does not have."""
        assert config.merge_adapter is None, "an adapter is merged before weights are opened"
        dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        try:
            loader = ModelLoader(
                folder,
                dtype=dtype,
                device=device,
                kernels=config.kernels,
                num_threads=num_threads,
                expert_weights=config.expert_weights,
                linear_weights=config.linear_weights,
                low_bit_products=config.low_bit_products,
                progress=progress,
                open_weights=open_weights,
            )
        except RuntimeError as error:
            raise ConfigError(f"model.kernels is {config.kernels!r}: {error}.") from error
        return OpenedModel(folder, config, loader.spec, loader, num_threads)

    def set_torch_threads(self) -> None:
        """Sets torch's number of threads in this process: 1 if the kernels have their own."""
        torch.set_num_threads(1 if self.loader.kernels.has_own_threads else self.num_threads)

    def load_attention(self, config: EngineConfig, gather: Gather | None = None) -> AttentionPart:
        """Loads everything but the routed experts, or one shard's part of it, and builds the
        configured cache."""
        loader, max_model_len = self.loader, self.max_model_len
        mtp = self.mtp_layer(config)
        mtp_loader = None if mtp is None else MTPLoader.open(loader, mtp)  # first, as it may refuse
        stage = loader.attention_stage(max_model_len, gather)
        form = checked_kv_form(config.cache, stage.spec)
        token_bytes = kv_bytes_per_token(stage.spec, mtp, loader.dtype.itemsize, form)
        itemsize = loader.dtype.itemsize  # of adapters, which are loaded later
        adapters = configured_bytes(
            config.adapters,
            self.folder,
            loader.spec,
            itemsize,
            is_merging=is_merging(config.adapters, loader.kernels),
        )
        pages = num_pages(
            config.cache,
            bytes_per_token=token_bytes,
            max_model_len=max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            available_bytes=free_bytes(loader.device)
            - reserved_bytes(config.adapters, adapters.total),
        )
        page_size = config.cache.page_size
        cache = KVCache(stage.spec, pages, page_size, loader.dtype, loader.device, form)
        drafting = None if mtp_loader is None else mtp_loader.load(stage, cache, max_model_len)
        return AttentionPart(stage, cache, pages, pages * page_size * token_bytes, drafting)

    def report(self, part: AttentionPart | None = None) -> LoadReport:
        """Reports on the model with its attention, if this process has that."""
        loader = self.loader
        report = LoadReport(
            kernels=loader.kernels.name,
            num_threads=self.num_threads,
            dtype=str(loader.dtype).removeprefix("torch."),
            device=str(loader.device),
            weight_format=loader.weight_format,
            expert_weights=loader.expert_weights,
            build=kernels_build(),
        )
        if part is None:
            return report
        return replace(
            report,
            num_pages=part.num_pages,
            kv_bytes=part.kv_bytes,
            kv_dtype=part.kv_dtype,
            page_bytes=sum(each[0].nbytes for each in part.cache.parts),
            page_geometry=page_geometry(part.cache).hex(),
        )
