"""Batch policies, which choose the sequences that start and split a step: `fifo`, `balanced`,
`expert-aware`."""
