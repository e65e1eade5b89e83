"""Expert weights in a slower tier: which experts are kept in memory, and which are read next."""
