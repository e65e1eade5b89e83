"""What plans are compared with: what engines do without a planner, and the published EPLB."""
