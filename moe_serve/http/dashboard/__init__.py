"""The state of a running server as data for the dashboard and `top`: GET /dashboard/state."""
