"""One training step of one member, and the state that it changes."""
