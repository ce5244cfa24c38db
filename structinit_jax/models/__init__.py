"""The models, in Flax NNX."""
