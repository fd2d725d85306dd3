"""The Ray cluster: its nodes, the autoscaler, placement groups, and the private symbols of Ray that we use."""
