"""Compiled CPU kernels: their bindings and the library that is built on first use."""
