"""Parts that all benchmarks share: machine limits, model sizes, work, spawned servers."""
