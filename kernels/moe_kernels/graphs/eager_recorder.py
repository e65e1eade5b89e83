"""A recorder that remembers the function and calls it again: graphs for machines without a GPU.

It holds callers to what a graph needs: whatever is read and written stays where it was.
"""

from __future__ import annotations

from collections.abc import Callable

from moe_kernels.graphs.graph_recorder import Addresses


class EagerRecorder:
    """Implements Recorder."""

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
