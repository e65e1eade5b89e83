"""The authenticated control connection between the coordinator and a rank."""
