"""The parts of `fault_soak.py` (load, damage, served) and of `soak.py` (served and the others)."""
