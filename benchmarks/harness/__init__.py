"""What the benchmark scripts share: the machine's limits, the work, the engines, the tables."""
