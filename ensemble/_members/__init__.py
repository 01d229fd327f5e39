"""The `Ensemble` (models of one architecture with stacked arrays), its evaluation, and its placement on devices.

Input: models, or a function that creates one and a seed. Output: the outputs of all members, stacked along axis 0, or a
`Prediction`.

- `functional_model.py`: wrap a pytree and an apply function as a model (the members of `Ensemble.from_apply`).
- `create.py`: create the stacked arrays, from given models or from a seed; on a mesh, each device creates those of its
  own members.
- `ensemble.py`: the `Ensemble` itself, a pytree of those arrays: indexing, views; `ndims.py`: the check that axis 0
  indexes the members.
- `call.py`: the compiled program of `ens(x)`: batched, or one member after another where that is faster.
- `prediction.py`: combine the outputs of the members into a mean, a variance and, for classification, entropies.

The following files are lower layers, which training uses too:

- `strategy.py`: execute a function of one member for all members: batched ("vmap"), in chunks, in a compiled loop
  ("map"), or unrolled ("unroll"); also the loop that writes the result of each member in place.
- `sharding.py`: the layout of the members and the batch over the devices of a mesh: placement, splitting, padding of a
  number of members that the devices do not divide, and the `shard_map` around a function of members.
- `rows.py`: take, replace or select rows of arrays with one row per member, on one device or on several.
"""
