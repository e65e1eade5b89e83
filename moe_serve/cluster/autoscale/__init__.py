"""Decides how many cells of each role a deployment has, from its load: pure logic on a clock, and
the thread that applies it to a running server."""
