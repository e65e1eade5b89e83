"""CUDA graphs: a step's launches recorded once, and started with one call.

All graphs share one pool of memory: they run one after another, so what one leaves behind serves
the next, and the largest decides. What must outlive a replay is written to tensors outside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_kernels.graphs.graph_recorder import Addresses

_WARM_UPS = 2  # the first compiles kernels and fills caches, the second runs as it will be recorded


class CudaRecorder:
    """Implements Recorder."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        self._free_before = torch.cuda.mem_get_info(device)[0]

    def record(self, function: Callable[[], None], fixed: Addresses) -> CudaRecording:
        assert all(t.is_cuda for t in fixed()), "a CUDA graph reads and writes the GPU's memory"
        current = torch.cuda.current_stream(self._device)
        # A capture that fails leaves its stream current: the outer context takes that back.
        with torch.cuda.device(self._device), torch.cuda.stream(current):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    function()
            current.wait_stream(self._stream)
            torch.cuda.synchronize(self._device)  # a fault of the warm-up shows here
            graph = torch.cuda.CUDAGraph()
            # What other threads do meanwhile is not part of it and does not break it.
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
