"""Everything that wraps or watches torch's own functions."""
