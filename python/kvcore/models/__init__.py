"""What a model is, as data, and how any of them is run."""
