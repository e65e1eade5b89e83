"""Records routing traces and learns predictors from them. Never imports `moe_serve`."""
