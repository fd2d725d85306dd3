"""Models run without data, to follow what their forward does: operations, modules and sizes."""
