"""Find entries: exactly in memory, in an index store, by words; and embed texts."""
