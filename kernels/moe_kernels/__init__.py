"""Kernels of moe-serve: each an API with checks, an implementation, and a plain-torch reference.

Usable without the server. Promise on a CPU in fp32 and bf16: *row invariance*. A row's result is
bit for bit the same whatever other rows stand beside it, how many there are, and how they are cut
into calls. `docs/internals/numerics.md` says how each operation keeps it.
"""

import os

# oneDNN's AMX kernels sum a row in an order that depends on how many rows come with it: a request's
# tokens would depend on its company. oneDNN reads this once, at its first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
