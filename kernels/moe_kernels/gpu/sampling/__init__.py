"""From logits to tokens on a GPU."""
