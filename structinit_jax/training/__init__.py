"""One step of training, and what surrounds it."""
