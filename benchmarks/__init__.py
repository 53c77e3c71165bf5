"""Scripts that make the committed figures; see docs/benchmarks.md and docs/results.md."""
