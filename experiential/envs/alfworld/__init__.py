"""Play ALFWorld's household tasks in text: real games, or generated ones on the same domain."""
