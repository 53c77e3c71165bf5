"""What single methods add to the loop: each is called from one place of the trainer, the rollout or a track."""
