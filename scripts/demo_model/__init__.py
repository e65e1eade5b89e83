"""Makes the demonstration model: corpus -> tokenizer -> training -> export -> report."""
