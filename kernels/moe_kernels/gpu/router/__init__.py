"""The router's choice on a GPU."""
