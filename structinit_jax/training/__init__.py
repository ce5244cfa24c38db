"""The training step and its state, checkpoints, metrics, devices and processes."""
