"""Store experience, find it, and schedule reading, writing and consolidation."""
