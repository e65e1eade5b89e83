"""Many streams at once over HTTP: the parts of `streams.py` and `http_overhead.py`."""
