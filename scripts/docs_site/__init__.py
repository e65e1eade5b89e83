"""The documentation as a site: `make docs`. Pages of the API and the command line are generated."""
