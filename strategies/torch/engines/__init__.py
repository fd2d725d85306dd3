"""The engines, one for each strategy, and the classes that they share."""
