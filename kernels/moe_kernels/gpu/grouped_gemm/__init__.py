"""The expert MLPs of a layer as two grouped matrix products, and their weighted sum."""
