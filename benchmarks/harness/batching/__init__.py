"""What batches packed by expected experts save: counted on real routing, and timed."""
