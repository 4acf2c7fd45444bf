"""What only makes it faster. Without this folder every answer is the same."""
