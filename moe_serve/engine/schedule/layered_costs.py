"""Predicts the cost of prompts that pass a model in groups of layers, and in chunks of tokens.

A layer with x rows costs, in units of a row of one expert:

    A(x) r + x (k + d)        A(x) = E (1 - (1 - k/E)^x) activated experts

E experts, k choices of a row, r rows whose products take as long as reading an expert, d the size
of the layer's dense weights relative to an expert's.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.model.spec import ModelSpec

# r in bf16: measured on a CPU (docs/measured/layered-prefill.md), from data sheets on a GPU
_READ_ROWS = {"cpu": 5.0, "cuda": 250.0}
_CACHED_ROWS = 1.0  # r on a CPU if its caches can hold all experts
_CACHE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredCosts:
    """The costs of a model's layers on one kind of device.

    `num_rows` are those that decode or were scheduled before, `budget` the tokens of a chunk.
    """

    num_layers: int
    num_experts: int
    top_k: int
    read_rows: float  # r
    dense_rows: float  # d
    num_attention_ranks: int = 1  # attention ranks whose rows meet at the experts

    @classmethod
    def of(cls, spec: ModelSpec, device: str, num_attention_ranks: int = 1) -> LayeredCosts | None:
        """Returns the costs of a model; None if it has no layer with routed experts."""
        if not spec.num_sparse_layers:
            return None
        shape, read_rows = spec.attention, _READ_ROWS.get(device, _READ_ROWS["cuda"])
        num_weights = 3 * spec.width * spec.expert_width * spec.router.num_experts
        if device == "cpu" and 2 * num_weights * spec.num_sparse_layers < _CACHE_BYTES:
            read_rows = _CACHED_ROWS
        dense = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim / 3
        return cls(
            num_layers=spec.num_layers,
            num_experts=spec.router.num_experts,
            top_k=spec.router.top_k,
            read_rows=read_rows,
            dense_rows=dense / spec.expert_width,
            num_attention_ranks=num_attention_ranks,
        )

    def cost(self, num_rows: float) -> float:
        """Returns the cost of one layer with these rows."""
        missed: float = (1 - self.top_k / self.num_experts) ** num_rows
        activated = self.num_experts * (1 - missed)
        return activated * self.read_rows + num_rows * (self.top_k + self.dense_rows)

    def more(self, num_rows: int, num_more: int) -> float:
        """Returns the additional cost of a layer with `num_more` rows beside `num_rows` of each
        attention rank."""
        beside = num_rows * self.num_attention_ranks
        return self.cost(beside + num_more) - self.cost(beside)

    def num_allowed(self, count: int, budget: int, num_rows: int) -> int:
        """Returns the number of layers with `count` tokens that cost as much as all layers with
        `budget` tokens."""
        whole = self.num_layers * self.more(num_rows, budget)
        return int((1 + 1e-9) * whole / self.more(num_rows, count))

    def most_tokens(self, group: int, most: int, budget: int, num_rows: int) -> int:
        """Returns the largest number of tokens, at most `most`, of which `group` layers are
        allowed."""
        least = 0
        while least < most:
            middle = (least + most + 1) // 2
            if self.num_allowed(middle, budget, num_rows) >= group:
                least = middle
            else:
                most = middle - 1
        return least

    def layered(self, pending: int, count: int, budget: int, num_rows: int) -> float:
        """Predicts the cost of reading `pending` tokens, `count` together in groups of layers, with
        the rows beside them."""
        total, beside = 0.0, self.cost(num_rows * self.num_attention_ranks)
        for first in range(0, pending, count):
            tokens = min(count, pending - first)
            allowed = max(1, self.num_allowed(tokens, budget, num_rows))
            num_steps = -(-self.num_layers // allowed)
            total += self.num_layers * (num_steps * beside + self.more(num_rows, tokens))
        return total

    def least(self, pending: int, budget: int, num_rows: int) -> float:
        """Returns a bound below `layered`, whatever tokens pass the layers together."""
        num_steps = self.more(num_rows, pending) / self.more(num_rows, budget)
        beside = self.cost(num_rows * self.num_attention_ranks)
        return self.num_layers * (num_steps * beside + self.more(num_rows, pending))

    def chunked(self, pending: int, budget: int, num_rows: int) -> float:
        """Predicts the cost of reading `pending` tokens in chunks, with the rows beside them."""
        num_whole, rest = divmod(pending, budget)
        beside = self.cost(num_rows * self.num_attention_ranks)
        total = num_whole * (beside + self.more(num_rows, budget))
        if rest:
            total += beside + self.more(num_rows, rest)
        return self.num_layers * total
