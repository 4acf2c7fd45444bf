"""Several rows at once, each operation's as if they were more samples."""
