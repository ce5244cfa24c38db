"""Trains a grid of initializations and other settings over several seeds, and compares them."""
