"""DP-SGD: sampling, clipped sums, noise, accounting, and the run that joins them."""
