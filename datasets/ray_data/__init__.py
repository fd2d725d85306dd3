"""Heavy transforms on Ray Data."""
