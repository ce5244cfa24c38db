"""The training step, its state, and everything around it."""
