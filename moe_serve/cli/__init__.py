"""The commands of `moe-serve`. A command imports what it needs when it runs."""
