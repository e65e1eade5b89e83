"""BitDelta adapters: fine-tunes that are stored as one sign for each weight."""
