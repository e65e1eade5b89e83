"""Carries tensors between ranks: shared memory, gloo, NCCL."""
