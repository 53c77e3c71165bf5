"""What the project claims, each claim by one command; results are kept in ``benchmarks/results/``."""
