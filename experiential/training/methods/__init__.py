"""Implement the training methods, each called from one place of trainer, rollout or track."""
