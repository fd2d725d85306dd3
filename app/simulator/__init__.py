"""Workers that step alone on a virtual clock, before machines are paid for: `trainwright simulate`."""
