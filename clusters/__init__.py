"""The cluster files themselves, so that they travel with the package; `trainwright.cluster_files` reads them."""
