"""The base that everything may import and that imports nothing of ours: frozen types and errors."""
