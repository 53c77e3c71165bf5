"""Merge entries, find duplicates, and forget entries."""
