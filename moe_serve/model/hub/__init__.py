"""Downloads models by name from a hub into the shared cache, and lists the models in the cache."""
