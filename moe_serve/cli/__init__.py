"""The commands of `moe-serve`, one file each. What a command needs is imported when it runs."""
