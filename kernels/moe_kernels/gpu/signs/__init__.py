"""Products with signs on a GPU: what BitDelta adapters add to linear layers and experts."""
