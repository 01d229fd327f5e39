"""What long runs share: the loop, its history, checkpoints, and files that are written atomically."""
