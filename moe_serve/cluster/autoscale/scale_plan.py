"""Writes and reads the file that passes a plan table from a simulation to a server."""

from __future__ import annotations

from pathlib import Path

import msgspec

from moe_serve.cluster.autoscale.plan_table import CellRates, PlanTable
from moe_serve.cluster.autoscale.policies import TokenMeans
from moe_serve.config.cells import CellRole
from moe_serve.errors import ConfigError

_VERSION = 1
_MOST_BYTES = 2**20


class PlannedRole(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cells of one role. `ranks` is their shape, such as 1A1E. For the other fields see
    `PlanTable`.
    """

    ranks: str
    prompt_tok_s: float | None
    output_tok_s: float | None
    most_load: tuple[float, ...]


class ScalePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan for cells of given shapes. `slo` is a text with the limits of latency that it keeps.
    `prompt_tokens` and `output_tokens` are the means of the requests for which it was made.
    """

    version: int = _VERSION
    slo: str
    prompt_tokens: float
    output_tokens: float
    roles: dict[CellRole, PlannedRole]

    @property
    def table(self) -> PlanTable:
        rates = {
            role: CellRates(prompt_tok_s=one.prompt_tok_s, output_tok_s=one.output_tok_s)
            for role, one in self.roles.items()
        }
        return PlanTable(
            rates=rates, most_load={role: one.most_load for role, one in self.roles.items()}
        )

    @property
    def means(self) -> TokenMeans:
        return TokenMeans(self.prompt_tokens, self.output_tokens)


def write_plan(plan: ScalePlan, path: Path) -> None:
    """Writes a plan. Raises ConfigError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}.") from None


def read_plan(path: Path) -> ScalePlan:
    """Reads a plan. Raises ConfigError with the reason if the file cannot be used."""
    try:
        with path.open("rb") as file:
            plan = msgspec.json.decode(file.read(_MOST_BYTES), type=ScalePlan)
    except OSError as error:
        raise ConfigError(f"cannot read the plan {path}: {error.strerror}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not a plan of moe-serve simulate --plan-out: {error}."
        ) from None
    numbers = [plan.prompt_tokens, plan.output_tokens]
    for one in plan.roles.values():
        numbers += [rate for rate in (one.prompt_tok_s, one.output_tok_s) if rate is not None]
        numbers += one.most_load
    has_loads = all(one.most_load for one in plan.roles.values())
    if plan.version != _VERSION or not plan.roles or not has_loads or min(numbers) <= 0:
        raise ConfigError(
            f"{path} cannot be used as a plan: it needs version {_VERSION}, a role, and rates, "
            "loads and tokens above 0."
        )
    return plan
