"""Batch norm and other per-channel scales folded into the weights next to them."""
