"""Several columns in one forward pass: operations take them as more samples."""
