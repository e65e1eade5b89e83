"""Decides from the load how many cells of each role a deployment has, and applies the decisions."""
