"""Comparisons of settings over seeds: `settings`, `grid`, `records` and `report`, in this order."""
