"""The training loop: rollouts, advantages, losses, buffers, checkpoints and the embedded runtime."""
