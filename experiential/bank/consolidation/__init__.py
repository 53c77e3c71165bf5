"""What becomes of entries over time: merged, recognised as the same, forgotten."""
