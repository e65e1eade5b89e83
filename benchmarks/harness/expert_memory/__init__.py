"""What benchmarks/expert_memory.py is made of."""
