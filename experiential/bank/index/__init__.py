"""Nearest entries: exact and resident, or Chroma for large banks; words; and the embeddings themselves."""
