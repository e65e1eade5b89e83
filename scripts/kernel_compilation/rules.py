"""Rules for compiled code; a broken rule is reported as one sentence with the numbers."""

from __future__ import annotations

from kernel_compilation.facts import CompiledFacts
from moe_kernels.gpu.compile_case import CompileCase

KIB = 1024
# Limits of one thread block: CUDA's programming guide, "technical specifications".
SHARED_LIMITS = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB}
TENSOR_MEMORY_COLUMNS = 512


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
