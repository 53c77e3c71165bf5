"""Software tasks in the format of SWE-bench: mend a bug in a real project with a shell, an editor and hidden tests."""
