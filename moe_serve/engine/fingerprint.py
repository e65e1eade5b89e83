"""Computes the `system_fingerprint` of answers, which changes when answers may change.

It covers the checkpoint (config.json, tokenizer, chat template, weights), the versions of moe-serve
and torch, the kernels, the machine's instruction set, the dtypes of the model and of the KV cache,
and the settings that shape answers. Replicas that agree in all of these have the same fingerprint.
"""

from __future__ import annotations

import platform
from hashlib import sha256
from pathlib import Path

import torch

from moe_serve import __version__
from moe_serve.cache.page_key import Digest, add_weight_file
from moe_serve.config.sections import Config
from moe_serve.engine.engine_facts import EngineFacts
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.safetensors_file import SafetensorsFile

MAX_WHOLE_BYTES = 256 * 2**20  # weights up to this size are read completely
_TEXTS = (
    *("config.json", "generation_config.json", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    "chat_template.jinja",
)
_TENSOR_BYTES = 256  # read per tensor of a larger checkpoint
_CHUNK_BYTES = 2**20
_NUM_DIGITS = 12


def system_fingerprint(layout: EngineFacts, config: Config) -> str:
    """Returns `fp_` followed by twelve hexadecimal digits."""
    server, cluster = config.server, config.engine.cluster
    digest = sha256()
    for detail in (
        __version__,
        torch.__version__,
        layout.dtype,
        layout.kernels,
        layout.weight_format,
        layout.expert_weights,
        str(layout.max_model_len),
        _processor(layout.device),
        cluster.wire_dtype,
        config.engine.cache.kv_dtype,
        config.engine.model.low_bit_products,
        server.tool_parser,
        server.reasoning_parser,
        str(server.grammar_in_reasoning),
        checkpoint_digest(layout.folder),
    ):
        digest.update(f"{len(detail)}:{detail}".encode())
    return f"fp_{digest.hexdigest()[:_NUM_DIGITS]}"


def checkpoint_digest(folder: Path) -> str:
    """Returns the digest of a checkpoint's files. Weights of up to `MAX_WHOLE_BYTES` are read
    completely; for larger ones the sizes, the headers and a few hundred bytes of every tensor are
    read."""
    digest = sha256()
    for path in filter(Path.is_file, (folder / name for name in _TEXTS)):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        _add_whole(digest, path)
    weights = sorted(filter(Path.is_file, folder.glob("*.safetensors")))
    is_small = sum(path.stat().st_size for path in weights) <= MAX_WHOLE_BYTES
    for path in weights:
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        if is_small:
            _add_whole(digest, path)
        else:
            add_weight_file(digest, path)
            _add_tensor_samples(digest, path)
    return digest.hexdigest()


def _add_whole(digest: Digest, path: Path) -> None:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)


def _add_tensor_samples(digest: Digest, path: Path) -> None:
    """Adds the middle of every tensor, as a fine-tune may change only a few tensors."""
    try:
        headers = sorted(SafetensorsFile(path).headers.values(), key=lambda header: header.begin)
    except CheckpointError:  # a file that the index does not name
        return
    with path.open("rb") as file:
        for header in headers:
            middle = (header.begin + header.end - _TENSOR_BYTES) // 2
            file.seek(max(header.begin, middle))
            digest.update(file.read(min(_TENSOR_BYTES, header.end - header.begin)))


def _processor(device: str) -> str:
    """Returns the machine's instruction set or GPU, which determines the order of additions."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
