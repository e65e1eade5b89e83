"""What a rank sees of a checkpoint: each file's size and a hash, to compare before loading.

Small files are hashed whole, of weights the header and samples: enough to tell another revision or
an unfinished copy, in milliseconds. A few flipped bits are found by the hash of what was loaded.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from moe_serve.cache.model_identity import add_weight_file
from moe_serve.cluster.control.messages import FileMark
from moe_serve.errors import CheckpointError
from moe_serve.regular_file import is_there, regular_file

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "*.safetensors"


def file_marks(folder: Path) -> list[FileMark]:
    """Of config.json, the index and every weight file, by name; raises CheckpointError.

    What is not there is left out: the comparison names it.
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
