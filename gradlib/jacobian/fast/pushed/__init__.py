"""Several columns at once, forward, each operation's as if they were more samples."""
