"""The fields of requests, their strict types, and the errors about them."""
