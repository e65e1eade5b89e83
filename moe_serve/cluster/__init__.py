"""Ranks in processes of their own: starts, finds, instructs and watches them."""
