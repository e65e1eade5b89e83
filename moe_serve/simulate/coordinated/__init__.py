"""Simulates cells under one coordinator: their shapes, roles, hand-overs and numbers over time."""
