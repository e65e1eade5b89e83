"""Records work once and replays it: a CUDA graph on a GPU, a plain call on other machines.

A recorded function takes nothing and returns nothing: it reads and writes tensors that keep their
addresses. The caller fills the inputs before a replay and reads the outputs after it, all on one
stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Addresses = Callable[[], Sequence[Tensor]]
_WARM_UPS = 2  # the first compiles kernels and fills caches, the second runs as it will be recorded


class Recording(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Runs it with the present content of its inputs. Returns before a device has done it."""
        ...


class GraphRecorder(Protocol):
    """Records functions on one device.

    Record the largest first: the others then fit into the memory that it took.
    """

    def record(self, function: Callable[[], None], fixed: Addresses) -> Recording:
        """Records a function; this may run it a few times.

        `fixed` returns the tensors that it reads and writes from outside: they must be at the same
        addresses at every replay.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Device memory that the recordings take so far."""
        ...


class CudaRecorder:
    """Implements GraphRecorder: a step's launches become a CUDA graph, which one call starts.

    All graphs share one pool of memory: they run one after another, so memory that one releases
    serves the next, and the largest graph decides the size of the pool. A result that must outlive
    a replay is written to a tensor outside the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        self._free_before = torch.cuda.mem_get_info(device)[0]

    def record(self, function: Callable[[], None], fixed: Addresses) -> CudaRecording:
        assert all(t.is_cuda for t in fixed()), "a CUDA graph reads and writes the GPU's memory"
        current = torch.cuda.current_stream(self._device)
        # A failed capture leaves its stream current; the outer context restores the former one.
        with torch.cuda.device(self._device), torch.cuda.stream(current):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    function()
            current.wait_stream(self._stream)
            torch.cuda.synchronize(self._device)  # a fault of the warm-up shows here
            graph = torch.cuda.CUDAGraph()
            # The work of other threads during the capture is not recorded and does not break it.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                function()
        return CudaRecording(graph)

    @property
    def num_bytes(self) -> int:
        return int(max(0, self._free_before - torch.cuda.mem_get_info(self._device)[0]))


class CudaRecording:
    """Implements Recording."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class EagerRecorder:
    """Implements GraphRecorder without a GPU: remembers the function and calls it again.

    It holds callers to the rule of graphs: tensors that are read and written do not move.
    """

    num_bytes = 0

    def __init__(self) -> None:
        self.num_recordings = self.num_replays = 0

    def record(self, function: Callable[[], None], fixed: Addresses) -> EagerRecording:
        function()
        self.num_recordings += 1
        return EagerRecording(self, function, fixed)


class EagerRecording:
    """Implements Recording."""

    def __init__(
        self, recorder: EagerRecorder, function: Callable[[], None], fixed: Addresses
    ) -> None:
        self._recorder, self._function, self._fixed = recorder, function, fixed
        self._places = self._look()

    def replay(self) -> None:
        self._check("before")
        self._function()
        self._check("after")
        self._recorder.num_replays += 1

    def _look(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        return [(t.data_ptr(), tuple(t.shape), t.stride()) for t in self._fixed()]

    def _check(self, when: str) -> None:
        found = self._look()
        assert len(found) == len(self._places), f"{len(found)} tensors, not {len(self._places)}"
        moved = [i for i, (a, b) in enumerate(zip(found, self._places, strict=True)) if a != b]
        assert not moved, f"{when} a replay tensors {moved} are not where they were recorded"
