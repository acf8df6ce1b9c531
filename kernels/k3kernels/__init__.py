"""One folder an op: `reference.py` is what the op means, other files are faster ways to the same result."""
