"""What the attention of a model does on images: numbers (`measures`, `collect`) and `figures`."""
