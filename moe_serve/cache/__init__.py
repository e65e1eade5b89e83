"""The KV cache: pages, who owns them, and the tensors behind them."""
