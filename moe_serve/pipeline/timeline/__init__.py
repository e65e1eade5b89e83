"""Records what each stage did, and when."""
