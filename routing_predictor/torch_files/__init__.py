"""Reads files that torch.save wrote: plain data and tensors, without running anything."""
