"""What happens to a token's queries, keys and values before attention, on a GPU."""
