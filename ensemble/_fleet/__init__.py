"""The parts of `fleet.py`: what happens in a worker, how the driver keeps groups running, and what it shows.

- `group.py`: the training of one group of members in a worker process, with its checkpoints and its reports;
- `cluster.py`: starts the groups of a round on Ray, and starts those again whose worker has died;
- `table.py`: the live table of groups.
"""
