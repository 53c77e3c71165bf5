"""ALFWorld: household tasks in text, real games from a user's data or made ones on the same domain."""
