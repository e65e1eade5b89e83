"""The contract that every kernel set fulfils, and the records it is called with."""
