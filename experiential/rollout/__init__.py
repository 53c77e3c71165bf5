"""Play episodes: tasks, slots of environment and actor, and what comes back from them."""
