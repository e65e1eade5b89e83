"""Chooses few compilations that cover everything or every kernel, and checks rules for compiled
code.

Everything is, for each kernel, every type of an argument, every switch, the smallest and the
largest of each size, and every number of warps and stages. Kernels that multiply matrices
are compiled for every chip. Not every combination of these is covered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from kernel_compilation.facts import CompiledFacts
from kernel_compilation.pool import Job
from moe_kernels.gpu.compile_case import CompileCase

Feature = tuple[object, ...]
KIB = 1024
# Limits of one thread block: CUDA's programming guide, "technical specifications".
SHARED_LIMITS = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB}
TENSOR_MEMORY_COLUMNS = 512


def covering(cases: Mapping[str, CompileCase], jobs: Sequence[Job]) -> list[Job]:
    """Chooses jobs that together have all features."""
    return _cover(jobs, job_features(cases, jobs))


def quick(cases: Mapping[str, CompileCase], jobs: Sequence[Job]) -> list[Job]:
    """Compiles each kernel in its largest sizes, with wgmma if it must have that, and for each
    chip a kernel that multiplies matrices. What else `covering` chooses is only translated."""
    ordered = sorted(jobs, key=lambda job: -_size(cases[job.case]))
    compiled = _cover(
        ordered, {job: _rough_features(cases[job.case], job.target) for job in ordered}
    )
    others = [job for job in covering(cases, jobs) if job not in compiled]
    return compiled + [dataclasses.replace(job, is_compiled=False) for job in others]


def _size(case: CompileCase) -> int:
    return math.prod(each for each in case.constexprs.values() if type(each) is int and each > 0)


def _rough_features(case: CompileCase, target: int) -> frozenset[Feature]:
    kernel = id(case.kernel)
    found: set[Feature] = {(kernel,)}
    if case.has_tensor_cores:
        found.add(("chip", target))
    if case.expects_wgmma and target == 90:
        found.add((kernel, "wgmma"))
    return frozenset(found)


def _cover(jobs: Sequence[Job], features: Mapping[Job, frozenset[Feature]]) -> list[Job]:
    """Repeatedly takes the job with the most missing features; among equal ones, the first."""
    missing = set[Feature]().union(*features.values())
    chosen: list[Job] = []
    while missing:
        best = max(jobs, key=lambda job: len(features[job] & missing))
        chosen.append(best)
        missing -= features[best]
    return chosen


def job_features(
    cases: Mapping[str, CompileCase], jobs: Sequence[Job]
) -> dict[Job, frozenset[Feature]]:
    """Returns the features that a job covers; kernels are distinguished by identity, as they
    cannot be compared.
    """
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


def broken_rules(case: CompileCase, target: int, facts: CompiledFacts) -> list[str]:
    """Returns one sentence per broken rule; none if the code follows all rules."""
    limit = SHARED_LIMITS[target]
    has_wrong_matrix = case.expects_wgmma and target == 90 and facts.num_wgmma == 0
    checks = {
        f"it keeps {facts.stack} bytes of stack per thread": facts.stack > 0,
        f"it spills: {facts.num_local} loads and stores of local memory": facts.num_local > 0,
        f"it wants {facts.shared} bytes of shared memory, the chip has {limit}": (
            facts.shared > limit
        ),
        f"it wants {facts.tensor_memory} columns of tensor memory, the chip has "
        f"{TENSOR_MEMORY_COLUMNS}": facts.tensor_memory > TENSOR_MEMORY_COLUMNS,
        "it multiplies no matrix with tensor cores": (
            (case.has_tensor_cores or case.expects_wgmma) and facts.num_matrix == 0
        ),
        f"it has no wgmma ({facts.num_mma} mma)": has_wrong_matrix,
    }
    return [
        f"{case.name} on sm_{target}: {text}" for text, is_broken in checks.items() if is_broken
    ]
