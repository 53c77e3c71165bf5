"""Train: rollouts, advantages, losses, buffers, checkpoints and the embedded runtime."""
