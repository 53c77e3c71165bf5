"""Attacks on a bank, each at a small size; benchmarks/poison.py measures them at full size."""
