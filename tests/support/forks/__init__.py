"""Starts processes of the tests as forks of a process that has imported torch and the server."""
