"""The driver: pure decisions (`decide`), the words they are made of (`messages`) and their effects (`conduct`)."""
