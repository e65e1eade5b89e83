"""Takes prompts through the layers in groups, and keeps their states between steps."""
