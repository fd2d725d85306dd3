"""Adapters to other frameworks' trainers."""
