"""Per-example gradients, their norms and clipped sums, from the parameter uses of any program."""
