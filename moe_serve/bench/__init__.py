"""A load generator for servers of OpenAI's API: workloads, a lean client, figures and reports.

The package knows nothing of the engine and does not import torch, so it also runs on machines
without the server.
"""
