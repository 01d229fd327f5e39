"""Training runs: the public `Trainer`, its loop, and the tools around it.

Input: an `Ensemble` and batches. Output: trained members, a history and checkpoints.

- `trainer.py`: `Trainer`, the public class. It checks its arguments, combines the step of one member (`_step`) with its
  executor (`_execution`), creates the first state, and prints the measurements of "auto". The loop that `fit` shares
  with `DPSGD` is in `transforms/_runs/loop.py`.
- `validation.py`: `Validation`, the loss and the metrics of all members on validation data, between steps.
- `callbacks.py`: `Callback`, a function that is called with metrics, and the state that it may ask for.
- `fit.py`: `train` is `Trainer.fit` once its options are checked: `resumed` finds the newest checkpoint; `Run` takes
  the steps, records the history, calls callbacks, saves, and warns of failures. Given the same batches, a resumed run
  equals an uninterrupted one to the bit: the checkpoint contains every array and key of the state, the history, the
  data of `Watch`, and the execution, and `train` skips the batches that were used.
- `progress.py`: the text of the progress bar.
- `schedule.py`: `Schedule`, the executions of the steps of a run, which a resumed run repeats.
- `identity.py`: what identifies a run of `Trainer.fit`, so that it does not resume from checkpoints of another one.
- `early_stopping.py`: `EarlyStopping`, `Restarts`, and `Watch`, which tracks the members of a run: the active
  ones, the best arrays of each, and the snapshots from which failed members restart.
- `checkpoint.py`: `save`, `load` and `load_member`: an ensemble or a training state on disk, alone or as part of a run.
  They define the arrays that an ensemble consists of. `CheckpointWriter` of `transforms/_runs` writes them atomically,
  and `Checkpoint` reads them, or those of one member.
- `orbax.py`: `to_orbax` and `from_orbax`, the same as a checkpoint of Orbax.
- `population.py`: `select`, `exploit`, `soup` and other operations between runs, which select, copy, perturb or average
  members.
- `_data`: `Batches`, `ProcessBatches`, and several passes over batches.
- `grid.py`: `grid`, hyperparameters for every combination of values.
- `tensorboard.py`: `TensorBoard`, a callback that writes the metrics as curves.
"""
