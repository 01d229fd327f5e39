"""Many models of one architecture, stored as one: the `Ensemble`, its evaluation, and where its members are.

In come models, or a function that makes one and a seed; out come the outputs of all members, stacked along axis 0, or a
`Prediction`.

- `functional_model.py`: a pytree with an apply function, as a model (the members of `Ensemble.from_apply`).
- `create.py`: the arrays of the members: given models stacked along axis 0 of every array, or models made from a seed,
  on each device its own.
- `ensemble.py`: the `Ensemble` itself, a pytree of those arrays: indexing, views, the check that axis 0 is the members.
- `call.py`: the compiled program of `ens(x)`: batched, or one member after another where that is quicker.
- `prediction.py`: the outputs of the members as a mean, a variance and, of classes, entropies.

Below these, and shared with training:

- `strategy.py`: how a function of one member is executed for all: at once ("vmap"), in chunks, in a compiled loop
  ("map"), or written out ("unroll"); also the loop that writes each member's result in place.
- `sharding.py`: the layout of members, and of the batch, over the devices of a mesh: where arrays are placed and split,
  how a number of members that does not divide is padded, and the `shard_map` around a function of members.
- `rows.py`: arrays with a row for each member: rows taken, replaced or chosen, on one device or on many.
"""
