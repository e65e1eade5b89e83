"""Makes plans whose tokens use few nodes and devices, under a cap on the load of a device."""
