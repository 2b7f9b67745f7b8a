"""Checkpoint to engine directory: everything that runs before an engine is shipped."""
