"""Training: the loop, the parts of a run, evaluation, checkpoints, devices and processes."""
