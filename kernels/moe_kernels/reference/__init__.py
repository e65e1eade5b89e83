"""The kernels in plain torch: the definition of the math, and the fallback."""
