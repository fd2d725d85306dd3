"""The order of rows and the step at which each comes."""
