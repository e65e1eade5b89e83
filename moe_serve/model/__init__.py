"""Loads models and computes their attention side: spec, families, checkpoint, attention stage,
router, head.
"""
