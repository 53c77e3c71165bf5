"""The experience bank: what is stored, how it is found, and who schedules reading, writing and consolidation."""
