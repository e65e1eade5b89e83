"""Random checkpoints in Hugging Face layout, for tests and benchmarks."""
