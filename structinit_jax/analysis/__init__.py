"""Analyzes the attention of models on images: numbers (`measures`, `collect`) and `figures`."""
