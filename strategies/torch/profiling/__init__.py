"""What a torch model costs, and recomputation of activations."""
