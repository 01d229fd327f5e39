"""Training runs: what `Trainer` makes of the step and the executor, and all that surrounds its loop.

An `Ensemble` and batches flow in; trained members, a history and checkpoints come out.

- `trainer.py`: `Trainer`, the public class: checks its arguments, puts together the step of one member (`_step`) and
  what executes it (`_execution`), makes the first state, goes over the batches in `fit`, and prints what "auto"
  measured. The loop that it shares with `DPSGD` is `transforms/_runs/loop.py`.
- `fit.py`: `resumed` finds the newest checkpoint, and `Run` takes the steps of `Trainer.fit`, records the history,
  calls callbacks, saves, and warns of what failed. Given the same batches, a resumed run equals an uninterrupted one
  to the bit: the checkpoint holds every array and key of the state, the history, what `Watch` knows of the members, and
  the strategy of the last step, and `Trainer.fit` skips the batches that were used.
- `early_stopping.py`: `EarlyStopping` and `Restarts`, and `Watch`, which holds what a run knows of its members: who is
  still in it, the best arrays of each, the snapshots to which failed members are put back.
- `checkpoint.py`: `save`, `load` and `load_member`: an ensemble or a training state on disk, alone or within a run.
  They say which arrays an ensemble consists of; `transforms/_runs/checkpoint.py` reads and writes them:
  `Checkpoint.member` reads one member alone, and `write` replaces a directory atomically.
- `population.py`: `select`, `exploit`, `soup` and other steps between runs, by which members are taken, copied,
  perturbed or averaged.
- `batches.py`: `Batches`, random batches, the same for all members or others for each.
- `grid.py`: `grid`, hyperparameters for every combination of values.
- `tensorboard.py`: `TensorBoard`, a callback that writes the metrics as curves.
"""
