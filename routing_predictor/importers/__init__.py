"""Imports traces and loads that other programs wrote. Nothing in their files is ever executed."""
