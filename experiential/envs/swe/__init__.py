"""Mend bugs in real projects with a shell, an editor and hidden tests (SWE-bench's format)."""
