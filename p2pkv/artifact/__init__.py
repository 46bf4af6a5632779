"""Artifacts: built from KV bytes, and read back with every claim of the manifest checked against the blocks' names."""
