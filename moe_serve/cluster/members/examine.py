"""A rank's part of the pre-flight: marks of its checkpoint files, and the ports it can reach.

A file mark is a file's size and a hash, compared before loading. Small files are hashed whole; of
weight files the header and samples are hashed. That is enough to tell another revision or an
unfinished copy in milliseconds. A few flipped bits are found by the hash of the loaded weights.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import torch

from moe_serve import __version__
from moe_serve.cache.model_identity import add_weight_file
from moe_serve.cluster.control.messages import Examine, Examined, FileMark
from moe_serve.cluster.control.probe import probe
from moe_serve.errors import CheckpointError
from moe_serve.regular_file import is_there, regular_file

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "*.safetensors"


def file_marks(folder: Path) -> list[FileMark]:
    """Returns the marks of config.json, the index and every weight file; raises CheckpointError.

    Missing files are left out: the comparison names them.
    """
    try:
        small = [path for name in (CONFIG, INDEX) if is_there(path := folder / name)]
        return [_mark(path) for path in (*small, *sorted(folder.glob(WEIGHTS)))]
    except OSError as error:
        where = error.filename or folder
        raise CheckpointError(f"cannot read {where}: {error.strerror or error}.") from error


def _mark(path: Path) -> FileMark:
    digest = sha256()
    if path.suffix == ".json":
        digest.update(regular_file(path).read_bytes())
    else:
        add_weight_file(digest, path)
    return FileMark(name=path.name, size=path.stat().st_size, digest=digest.hexdigest())


def versions() -> dict[str, str]:
    """Returns the versions that must be equal on all ranks. The handshake checks the protocol's
    own."""
    return {"moe-serve": __version__, "torch": str(torch.__version__)}


def examine(order: Examine) -> Examined:
    probes = probe(order.targets, order.timeout_s)
    try:
        return Examined(files=file_marks(Path(order.folder)), probes=probes)
    except CheckpointError as error:
        return Examined(files=(), probes=probes, why=str(error))
