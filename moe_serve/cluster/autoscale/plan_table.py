"""Says how many cells a load takes: what one cell computes in a second, and how full it may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_serve.config.cells import CellRole


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRates:
    """Tokens that one cell computes in a second, if it does nothing else. None: not its work."""

    prompt_tok_s: float | None
    output_tok_s: float | None

    def seconds(self, prompt_tokens: float, output_tokens: float) -> float:
        """Returns the seconds of one cell that these tokens take."""
        prompt_s = prompt_tokens / self.prompt_tok_s if self.prompt_tok_s else 0.0
        return prompt_s + (output_tokens / self.output_tok_s if self.output_tok_s else 0.0)


def cells_ratio(
    prompt_tokens: float, output_tokens: float, prefill: CellRates, decode: CellRates
) -> float:
    """Returns the prefill cells for one decode cell that a request's mean tokens take.

    (L_in / Thr_P) / (L_out / Thr_D), where L_in counts the tokens that no cache has:

        1 155 / 62 700  /  (211 / 18 600)  =  1.62     (DeepSeek's nodes on Azure's conversations)
    """
    return prefill.seconds(prompt_tokens, 0) / decode.seconds(0, output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """`most_load[n - 1]`: the largest share of the time of n cells that may be needed; more cells
    than it has entries are filled as the last entry says. Requests come in bursts, so few cells can
    be filled less than many."""

    rates: Mapping[CellRole, CellRates]
    most_load: Mapping[CellRole, tuple[float, ...]]

    def cells_for(
        self, role: CellRole, requests_per_s: float, prompt_tokens: float, output_tokens: float
    ) -> int:
        """Returns the fewest cells of a role for a rate of requests with these mean tokens."""
        needed = requests_per_s * self.rates[role].seconds(prompt_tokens, output_tokens)
        loads = self.most_load[role]
        for count, load in enumerate(loads, 1):
            if needed <= count * load:
                return count
        count = len(loads)
        while needed > count * loads[-1]:
            count += 1
        return count
