"""Traces of the routing and predictors learnt from them. Never imports `moe_serve`."""
