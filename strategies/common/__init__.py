"""What engines of both frameworks share."""
