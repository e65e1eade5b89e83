"""Code that tests of several folders share: fakes, small models and drivers of processes."""
