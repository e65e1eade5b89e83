"""Measures plans of expert placement beside EPLB's plans and their bounds."""
