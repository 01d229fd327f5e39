"""Models split into arrays and all else, and put together again: Flax NNX, Equinox, pytrees."""
