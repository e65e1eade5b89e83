"""The KV cache: its pages, their owners, and the tensors behind them."""
