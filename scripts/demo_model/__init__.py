"""How the demonstration model is made: corpus -> tokenizer -> training -> export -> report."""
