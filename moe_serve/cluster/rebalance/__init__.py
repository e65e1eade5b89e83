"""Experts that move between ranks while these serve: measured, planned, copied, switched."""
