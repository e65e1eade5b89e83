"""The routes for operators: health, model, traces and placement."""
