"""The parts of `benchmarks/gpu_engine.py`: random models on the device, engines, limits, report."""
