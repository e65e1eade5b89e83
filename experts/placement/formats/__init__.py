"""Plans as other engines write and take them, read and written by the rules of each."""
