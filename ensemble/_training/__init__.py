"""Training runs: the trainer, its loop, checkpoints, early stopping, populations, and batches."""
