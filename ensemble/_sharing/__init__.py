"""Members of any kind as one, once they are trained.

- `committee.py`: `Committee`: ensembles and models of different architectures behind one `predict`. It calls each group
  as an ensemble, stacks the outputs of all members, and takes their weighted mean as `_members/prediction.py` does.
- `export.py`: `export`: the prediction as a program of `jax.export` with its arrays, in the file that
  `transforms/program/_aot/exported.py` writes and reads.
"""
