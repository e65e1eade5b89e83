"""Builds the documentation as a site: `make docs`. Pages of the API and the commands are
generated.
"""
