"""Templates of cluster files, as data of the package; `trainwright.cluster_files` reads them."""
