"""Data sets (TFDS without TensorFlow) and the batches of training and evaluation."""
