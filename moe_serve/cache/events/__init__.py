"""Publishes the changes of prefix caches to gateways that route by cached prefixes."""
