"""Few compilations that have everything in them: every kernel, and of each kernel every type of an
argument, every switch, the smallest and the largest of each size, every number of warps and stages,
and where it multiplies matrices every chip. Not every combination of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernel_compilation.pool import Job
from moe_kernels.gpu.compile_case import CompileCase

Feature = tuple[object, ...]


def covering(cases: Mapping[str, CompileCase], jobs: Sequence[Job]) -> list[Job]:
    """Choose jobs that together have all features: repeatedly take the job with most of the missing
    ones, the first of several equal ones."""
    features = job_features(cases, jobs)
    missing = set().union(*features.values())
    chosen: list[Job] = []
    while missing:
        best = max(jobs, key=lambda job: len(features[job] & missing))
        chosen.append(best)
        missing -= features[best]
    return chosen


def job_features(
    cases: Mapping[str, CompileCase], jobs: Sequence[Job]
) -> dict[Job, frozenset[Feature]]:
    """Kernels are told apart by their identity: they cannot be compared."""
    sizes: dict[Feature, set[int]] = {}
    for case in cases.values():
        for name, value in case.constexprs.items():
            if type(value) is int:
                sizes.setdefault((id(case.kernel), name), set()).add(value)
    ends = {key: {min(values), max(values)} for key, values in sizes.items()}
    return {job: frozenset(_features(cases[job.case], job.target, ends)) for job in jobs}


def _features(case: CompileCase, target: int, ends: Mapping[Feature, set[int]]) -> set[Feature]:
    kernel = id(case.kernel)
    found: set[Feature] = {(kernel, "warps", case.num_warps), (kernel, "stages", case.num_stages)}
    if case.has_tensor_cores:
        found.add((kernel, "chip", target, case.expects_wgmma))
    for name, value in case.constexprs.items():
        if type(value) is not int or value in ends[kernel, name]:
            found.add((kernel, name, repr(getattr(value, "cache_key", value))))
    return found | {(kernel, name, kind) for name, kind in case.signature.items()}
