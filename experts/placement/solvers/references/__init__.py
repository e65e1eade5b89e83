"""Reference solvers for comparison: what engines do without a planner, and the published EPLB."""
