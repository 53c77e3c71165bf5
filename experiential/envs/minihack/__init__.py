"""MiniHack: any level of it in words."""
