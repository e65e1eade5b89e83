"""The model facts that a plan needs: the numbers of its layers and the bytes of an expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experts.placement.placement_error import PlacementInputError
from experts.placement.problem.workloads import Workloads

_MAX_LAYERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about the model, before and after they are combined with the loads."""

    num_layers: int | None = None
    sparse: tuple[int, ...] | None = None
    dense: frozenset[int] | None = None
    num_experts: int | None = None
    top_k: int | None = None
    num_groups: int = 1
    bytes_per_expert: int | None = None

    @classmethod
    def stated(
        cls, num_layers: int | None, dense_layers: str | None, bytes_per_expert: int | None
    ) -> ModelFacts:
        """Returns facts without a model's files; `dense_layers` is as 0-2,5. Raises
        PlacementInputError."""
        dense = None if dense_layers is None else _numbers(dense_layers)
        sparse = None
        if dense is not None and num_layers is not None:
            sparse = tuple(layer for layer in range(num_layers) if layer not in dense)
        return cls(
            num_layers=num_layers, sparse=sparse, dense=dense, bytes_per_expert=bytes_per_expert
        )

    def with_loads(self, workloads: Workloads) -> tuple[Workloads, ModelFacts]:
        """Returns loads whose layers have the model's numbers, if these are known, and facts with
        `sparse` set.

        Raises PlacementInputError if loads and model contradict each other.
        """
        loads = workloads.loads
        if self.num_experts not in (None, loads.num_experts):
            raise PlacementInputError(
                f"the loads have {loads.num_experts} experts, but the model has "
                f"{self.num_experts}: if the last experts were never chosen, give "
                f"--num-experts {self.num_experts}."
            )
        whole = self._completed(len(loads.layers))
        if whole.sparse is None:
            is_known = workloads.has_model_numbers
            return workloads, replace(whole, sparse=loads.layers if is_known else None)
        if loads.layers == whole.sparse:
            return workloads, whole
        if loads.layers != tuple(range(len(whole.sparse))):
            raise PlacementInputError(
                f"the loads are for layers {_runs(loads.layers)}, but the model has routed "
                f"experts in layers {_runs(whole.sparse)}."
            )
        renumbered = replace(loads, layers=whole.sparse)
        tokens = workloads.tokens
        if tokens is not None:
            tokens = replace(tokens, layers=whole.sparse)
        return replace(workloads, loads=renumbered, tokens=tokens), whole

    def _completed(self, num_sparse: int) -> ModelFacts:
        """Returns facts with `sparse` set, if the layers of model and loads determine it."""
        if self.sparse is not None:
            return self
        if self.dense is not None:
            count = num_sparse + len(self.dense)
            if max(self.dense, default=0) >= count:
                raise PlacementInputError(
                    f"--dense-layers names layer {max(self.dense)}, but {num_sparse} "
                    f"layers with loads and {len(self.dense)} dense ones make only {count} "
                    "layers."
                )
            sparse = tuple(layer for layer in range(count) if layer not in self.dense)
            return replace(self, num_layers=count, sparse=sparse)
        if self.num_layers == num_sparse:
            return replace(self, sparse=tuple(range(num_sparse)))
        if self.num_layers is not None and self.num_layers < num_sparse:
            raise PlacementInputError(
                f"--num-layers must be at least {num_sparse}, the number of layers of the "
                f"loads; got {self.num_layers}."
            )
        return self


def _numbers(text: str) -> frozenset[int]:
    """Parses "0-2,5" as {0, 1, 2, 5}; "" and "none" give an empty set."""
    found = set[int]()
    for part in text.replace(" ", "").split(",") if text not in ("", "none") else ():
        first, dash, last = part.partition("-")
        is_run = first.isdecimal() and (last.isdecimal() if dash else True)
        if not is_run or int(last or first) >= _MAX_LAYERS or int(last or first) < int(first):
            raise PlacementInputError(
                f"--dense-layers must be numbers and ranges of layers, such as 0-2,5; got {text!r}."
            )
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _runs(numbers: Sequence[int]) -> str:
    """Formats [0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
