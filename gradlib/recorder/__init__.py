"""Who records: hooks on modules, tensors and graph nodes."""
