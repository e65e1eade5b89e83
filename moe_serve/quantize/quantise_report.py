"""Reports a quantised model: as a record for JSON, as lines for a terminal, and as a model card."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from moe_serve.quantize.comparison import DomainFigures
from moe_serve.quantize.quantise_plan import is_fused, is_read_by_transformers, storages
from moe_serve.quantize.quantize_job import QuantiseOutcome


def report_files(outcome: QuantiseOutcome) -> Mapping[str, bytes]:
    """Returns the files that the quantised folder gets: the report and the model card."""
    return {
        "quantization_report.json": (json.dumps(record(outcome), indent=2) + "\n").encode(),
        "README.md": model_card(outcome).encode(),
    }


def record(outcome: QuantiseOutcome) -> dict[str, Any]:
    """Returns everything that was measured, for JSON."""
    job = outcome.job
    return {
        "model": job.folder.resolve().name,
        "storage": [storage.name for storage in storages(outcome.plan)],
        "method": "gptq" if job.is_gptq else "rtn",
        "is_pooled": job.is_gptq and job.is_pooled,
        "int8_layers": sorted(outcome.int8_layers),
        "divergence_of_each_layer_alone": list(outcome.divergences),
        "bytes_before": outcome.bytes_before,
        "bytes_after": outcome.bytes_after,
        "seconds": round(outcome.seconds, 1),
        "calibration_tokens": dict(outcome.num_calibration_tokens),
        "domains": [_domain(figures) for figures in outcome.domains],
        "layers": [
            {
                "layer": layer,
                "tokens_with_other_experts": _at(outcome.rerouted, layer),
                "experts": [{"rows": each.num_rows, "rule": each.rule} for each in reports],
            }
            for layer, reports in enumerate(outcome.experts)
        ],
    }


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _domain(figures: DomainFigures) -> dict[str, Any]:
    return {
        "domain": figures.domain,
        "tokens": figures.num_tokens,
        "perplexity_before": figures.perplexity_before,
        "perplexity_after": figures.perplexity_after,
        "ratio": figures.ratio,
        "kl": figures.kl,
        "top1": figures.top1,
    }


def summary(outcome: QuantiseOutcome) -> list[str]:
    """Returns lines for the terminal."""
    before, after = outcome.bytes_before, outcome.bytes_after
    lines = [
        f"{outcome.job.out}: {after / 1e9:.3f} GB, {after / before:.0%} of {before / 1e9:.3f} GB, "
        f"in {outcome.seconds:.0f} s; {', '.join(s.name for s in storages(outcome.plan))}"
    ]
    if outcome.int8_layers:
        lines.append(f"layers in int8: {', '.join(map(str, sorted(outcome.int8_layers)))}")
    if not is_read_by_transformers(outcome.plan):
        lines.append(_NOT_FOR_TRANSFORMERS)
    if rules := _rules(outcome):
        lines.append(f"experts by rule: {rules}")
    if outcome.domains:
        lines += _table(outcome.domains)
    return lines


def _rules(outcome: QuantiseOutcome) -> str:
    """Returns "own 180, pooled 12", with the fewest rows that an expert had."""
    reports = [each for layer in outcome.experts for each in layer]
    if not reports:
        return ""
    counts = Counter(each.rule for each in reports)
    fewest = min(each.num_rows for each in reports)
    named = ", ".join(f"{rule} {counts[rule]}" for rule in ("own", "pooled", "rtn") if counts[rule])
    return f"{named}; fewest rows of an expert: {fewest}"


def _table(domains: Sequence[DomainFigures]) -> list[str]:
    """Returns a Markdown table by domain, with the mean over domains."""
    lines = [
        "| domain | tokens | perplexity before | after | ratio | KL in nats | same top token |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in domains:
        lines.append(
            f"| {each.domain} | {each.num_tokens} | {each.perplexity_before:.3f} | "
            f"{each.perplexity_after:.3f} | {each.ratio:.4f} | {each.kl:.5f} | {each.top1:.2%} |"
        )
    num = len(domains)
    lines.append(
        f"| mean | {sum(d.num_tokens for d in domains)} | | | "
        f"{sum(d.ratio for d in domains) / num:.4f} | {sum(d.kl for d in domains) / num:.5f} | "
        f"{sum(d.top1 for d in domains) / num:.2%} |"
    )
    return lines


_NOT_FOR_TRANSFORMERS = (
    "transformers 5 cannot load this: it reads one storage of routed experts and one of all other "
    "matrices; moe-serve and vLLM read several."
)
_RULES = """\
Rules: *own* experts were rounded for their own rows, together with a few of all tokens; *pooled*
ones had fewer than four rows for each input, so the statistics of all tokens count for more; *rtn*
ones were rounded to nearest.
"""


def model_card(outcome: QuantiseOutcome) -> str:
    """Returns the README.md of the quantised folder."""
    job, name = outcome.job, outcome.job.folder.resolve().name
    method = "GPTQ" if job.is_gptq else "rounding to nearest"
    kinds = "; ".join(storage.name for storage in storages(outcome.plan))
    stored = "MXFP4" if is_fused(outcome.plan) else "compressed-tensors `pack-quantized`"
    lines = [
        "---",
        "library_name: transformers",
        f"tags: [quantized, {'gptq' if job.is_gptq else 'rtn'}]",
        "---",
        "",
        f"# {name}, quantised",
        "",
        f"Made from `{name}` by `moe-serve quantize`, with {method}. Weights are stored as "
        f"{stored}: {kinds}. Routers, norms, embeddings and all other "
        "tensors are those of the original.",
        "",
        f"The weights take {outcome.bytes_after / 1e9:.3f} GB instead of "
        f"{outcome.bytes_before / 1e9:.3f} GB.",
        "",
    ]
    if not is_read_by_transformers(outcome.plan):
        lines += [_NOT_FOR_TRANSFORMERS, ""]
    if outcome.domains:
        lines += ["## Held-out texts", "", *_table(outcome.domains), ""]
    if outcome.num_calibration_tokens:
        lines += ["## Calibration", ""]
        tokens = outcome.num_calibration_tokens
        lines += [f"Tokens: {', '.join(f'{k} {v}' for k, v in tokens.items())}.", ""]
        lines += [f"Experts by rule: {_rules(outcome)}.", "", _RULES]
        lines += _layers_table(outcome)
    lines += ["`quantization_report.json` has every figure, also of each expert.", ""]
    return "\n".join(lines)


def _layers_table(outcome: QuantiseOutcome) -> list[str]:
    lines = ["| layer | fewest rows of an expert | most | rules | tokens with other experts |"]
    lines.append("|---|---|---|---|---|")
    for layer, reports in enumerate(outcome.experts):
        if not reports:
            continue
        counts = Counter(each.rule for each in reports)
        rules = ", ".join(f"{rule} {num}" for rule, num in sorted(counts.items()))
        share = _at(outcome.rerouted, layer)
        rows = [each.num_rows for each in reports]
        shown = "" if share is None else f"{share:.1%}"
        lines.append(f"| {layer} | {min(rows)} | {max(rows)} | {rules} | {shown} |")
    return [*lines, ""]
