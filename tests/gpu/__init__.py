"""Engines on a GPU, as plain processes without Ray. Deselected where there is none, unless another device stands in."""

STAND_IN = "TRAINWRIGHT_GPU_STAND_IN"  # the environment variable that names the device, such as `cpu`
