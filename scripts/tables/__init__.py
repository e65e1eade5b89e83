"""Writes the generated tables and dashboards of the documentation."""
