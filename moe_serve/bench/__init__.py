"""A load generator for servers of OpenAI's API: workloads, a lean client, figures and reports.

Knows nothing of the engine and needs no torch: it runs where the server does not.
"""
