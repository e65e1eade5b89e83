"""Semantics of CUDA graphs on a CPU: launches and torch operations are taped and replayed.

No Python code of the host runs in a replay: grids, scalars, shapes and addresses are those of the
recording. So a tape makes the mistakes that a graph makes, and refuses operations that would wait
for the device while it is taped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from moe_kernels.graphs.graph_recorder import Addresses

_WAITS = {
    "aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select",
    "aten::equal", "aten::is_nonzero", "aten::_unique2", "aten::bincount",
    "aten::repeat_interleave.Tensor",
}  # fmt: skip
Act = Callable[[], object]


class _Tape(TorchDispatchMode):
    """Runs every operation and remembers how to run it again into the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.acts: list[Act] = []
        self.launches: list[tuple[str, object]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        assert name not in _WAITS, f"{name} waits for the device"
        result = func(*args, **kwargs)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        held = {t.untyped_storage().data_ptr() for t in inputs}
        if func._schema.is_mutable:
            self.acts.append(lambda: func(*args, **kwargs))
        elif not all(t.untyped_storage().data_ptr() in held for t in outputs):  # else: views
            assert name != "aten::index.Tensor" or not _has_masks(args), "a mask waits"
            self.acts.append(lambda: _again(func, args, kwargs, outputs))
        return result

    def launch(self, call: Callable[..., None], executor: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            call(executor, *args, **kwargs)
        self.launches.append((executor.fn.__name__, executor.grid))
        self.acts.append(lambda: call(executor, *args, **kwargs))


def _again(func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
    results = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
    for output, result in zip(outputs, results, strict=True):
        output.copy_(result)


def _has_masks(args: Sequence[Any]) -> bool:
    return any(isinstance(t, Tensor) and t.dtype is torch.bool for t in tree_leaves(args[1]))


class TapeRecorder:
    """Implements Recorder."""

    num_bytes = 0

    def __init__(self) -> None:
        self.tapes: list[TapeRecording] = []

    def record(self, function: Callable[[], None], fixed: Addresses) -> TapeRecording:
        tape = _Tape()
        with _taped_launches(tape), tape:
            function()
        self.tapes.append(TapeRecording(tape))
        return self.tapes[-1]


class TapeRecording:
    """Implements Recording."""

    def __init__(self, tape: _Tape) -> None:
        self._acts, self.launches, self.num_replays = tape.acts, tape.launches, 0

    def replay(self) -> None:
        for act in self._acts:
            act()
        self.num_replays += 1


@contextmanager
def _taped_launches(tape: _Tape) -> Iterator[None]:
    call = interpreter.GridExecutor.__call__

    def taped(executor: Any, *args: Any, **kwargs: Any) -> None:
        tape.launch(call, executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = taped
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = call
