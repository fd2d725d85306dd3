"""Losses of students and outputs of teachers, without a framework."""
