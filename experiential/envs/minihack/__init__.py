"""Play any level of MiniHack in words."""
