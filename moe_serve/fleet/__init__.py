"""Plans fleets: which cells on which devices serve a workload at the lowest cost, as simulated."""
