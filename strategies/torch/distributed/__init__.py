"""Process groups, device meshes and FSDP of torch."""
