"""What everything else uses: checked arguments, axes, memory budgets, jaxprs, keys, and the versions of JAX."""
