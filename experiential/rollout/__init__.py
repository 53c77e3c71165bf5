"""Play episodes: tasks, slots of environment and actor, and their results."""
