"""Local search for a balanced placement."""
