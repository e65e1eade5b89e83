"""Decides how many cells of each role a deployment has, from its load. Pure logic on a clock."""
