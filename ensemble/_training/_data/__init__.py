"""Batches for `Trainer.fit`.

- `batches.py`: `Batches`, random batches, shared by all members or different for each; `in_epochs`, several passes
  over batches.
- `process_batches.py`: `ProcessBatches`, batches of which each of several processes makes its own part.
"""
