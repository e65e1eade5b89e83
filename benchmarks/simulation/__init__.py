"""Compares the simulator with runs of this machine and with published figures."""
