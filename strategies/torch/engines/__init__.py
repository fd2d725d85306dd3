"""The engines, one for each strategy."""
