"""Computes how many cells a load needs, from the tokens that one cell computes in a second and the
load that it may take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_serve.config.cells import CellRole


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRates:
    """Tokens that one cell computes in a second if it does nothing else; None if that is not its
    work.
    """

    prompt_tok_s: float | None
    output_tok_s: float | None

    def seconds(self, prompt_tokens: float, output_tokens: float) -> float:
        """Returns the seconds of one cell that these tokens take."""
        prompt_s = prompt_tokens / self.prompt_tok_s if self.prompt_tok_s else 0.0
        return prompt_s + (output_tokens / self.output_tok_s if self.output_tok_s else 0.0)


def cells_ratio(
    prompt_tokens: float, output_tokens: float, prefill: CellRates, decode: CellRates
) -> float:
    """Returns the number of prefill cells for each decode cell that requests with these mean tokens
    need.

    (L_in / Thr_P) / (L_out / Thr_D), where L_in counts the tokens that no cache has:

        1 155 / 62 700  /  (211 / 18 600)  =  1.62     (DeepSeek's nodes on Azure's conversations)
    """
    return prefill.seconds(prompt_tokens, 0) / decode.seconds(0, output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """The number of cells for a load. `most_load[n - 1]` is the largest share of the time of n
    cells that the load may need; the last entry also holds for more cells. Requests come in bursts,
    so a few cells cannot be filled as much as many.
    """

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
