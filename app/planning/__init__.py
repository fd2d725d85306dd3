"""From a job and a cluster to a plan: descriptions, profiles, choices."""
