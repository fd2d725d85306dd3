"""What `trainwright doctor` does: facts are gathered on each node, judged by pure functions, and shown."""
