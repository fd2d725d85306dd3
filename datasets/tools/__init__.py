"""Converting, inspecting and writing data sets."""
