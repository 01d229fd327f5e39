"""Long runs: the loop over batches, its history, its checkpoints, and files that are written atomically.

The `fit` methods of ensembles and of private training pass a state, batches, and functions that advance the state by
one step and save it; they get back the last state and a history:

- `run_directory.py` finds the newest undamaged checkpoint of a run, to resume from, writes new ones, and removes old
  ones; a checkpoint that cannot be written does not end the run;
- `identity.py` compares a run with the one that wrote a checkpoint: its first state, its batches and its program;
- `loop.py` takes the steps, shows progress, saves checkpoints at an interval, and stops cleanly on Ctrl-C and SIGTERM;
- `source.py` takes the batches one by one, or several as one, and goes to where a resumed run was in them;
- `data.py` converts and checks the arrays of a batch or of all examples;
- `optimizer.py` brings optax optimizers into one form, and checks that a state belongs to one;
- `history.py` records metrics in arrays and returns them as rows;
- `manifest.py` declares all that a checkpoint says, as dataclasses: arrays with shapes, dtypes and checksums, settings,
  and what identifies the run;
- `checkpoint_writer.py` writes a checkpoint: the arrays of each member, and the manifest. The directory is written
  under a temporary name and renamed once it is on the disk, so it is complete or absent;
- `checkpoint.py` reads and checks all of it, or a single member (`Checkpoint.member`);
- `held_rows.py` finds the members that this process holds or needs, where arrays spread over devices;
- `processes.py` lets several processes that share arrays exchange small values, and raise together if one fails.

Files are read and written by `transforms/_files`.
"""
