"""What tests of several folders share: fakes, small models and drivers of processes."""
