"""Who joins and how a step is split: `fifo`, `balanced` or `expert-aware`."""
