"""`trainwright submit`: a job file packed, sent to a cluster's job server, followed, attached to again and stopped."""
