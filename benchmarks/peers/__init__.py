"""The peers, written the way their own documentation shows."""
