"""Costs of a torch model, and figures of a device."""
