"""Plans whose tokens touch few nodes and devices, under a cap on the load of a device."""
