"""Several rows in one pass: operations take them as if they were more samples."""
