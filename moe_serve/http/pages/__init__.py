"""The files of the dashboard and the playground, which a browser loads without an API key."""
