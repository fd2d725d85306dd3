"""The cluster files themselves, so that they travel with the package; `trainwright.clusterfiles` reads them."""
