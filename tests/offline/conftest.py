"""The tiny checkpoints of the engine's tests, for the tests of `LLM`."""

from tests.engine.conftest import checkpoints, tiny

__all__ = ["checkpoints", "tiny"]
