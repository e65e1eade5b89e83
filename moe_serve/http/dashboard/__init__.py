"""What a page, or `top`, shows of a running server, as data: GET /dashboard/state."""
