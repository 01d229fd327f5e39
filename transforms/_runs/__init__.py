"""Long runs: the loop over batches, its history, its checkpoints, and files that are written atomically.

`fit` of an ensemble and of private training give this folder a state, batches, and functions that advance the state by
a step and save it; they get back the last state and a history:

- `run_directory.py` finds the newest undamaged checkpoint of a run to go on from, and removes old ones;
- `loop.py` takes the steps, shows progress, saves every so many of them, and ends cleanly on Ctrl-C;
- `history.py` records metrics in arrays and returns them as rows;
- `checkpoint.py` writes one checkpoint (the arrays of each member, and a manifest with shapes, dtypes and checksums),
  and reads and checks all of it, or one member alone (`Checkpoint.member`). The directory is written under another name
  and renamed once it is on the disk, so it is complete or absent;
- `array_store.py` puts named arrays into a directory, and gets some of them, by tensorstore;
- `processes.py` lets several processes that share arrays exchange small values, and fail together if one fails.

`atomic_write.py` makes a single file atomic, for all files of the library (safetensors, tuning caches, programs): it
is written under another name, flushed to the disk, and renamed.
"""
