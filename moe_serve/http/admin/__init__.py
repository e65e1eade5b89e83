"""The routes for operators: health, model, tokens, traces and placement."""
