"""Pipeline stages: the split of a model, schedules, messages."""
