"""The integer program of a layer, by HiGHS, and what it proves."""
