"""The attention side of a model: spec, families, checkpoint, attention stage, router, head."""
