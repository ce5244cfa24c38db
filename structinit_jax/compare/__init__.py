"""Comparisons of settings over seeds: `settings`, `grid` and `report`, in this order."""
