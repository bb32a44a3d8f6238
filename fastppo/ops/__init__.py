"""The public ops, one module each."""
