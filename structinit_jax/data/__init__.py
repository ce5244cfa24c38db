"""Data sets, and their batches for training and evaluation.

`datasets.open_dataset` opens a data set by name; `loader.make_loader` turns a split into batches.
"""
