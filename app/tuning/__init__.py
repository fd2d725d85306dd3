"""Search hyper-parameters: settings from a search space, trained as runs side by side and compared by a metric."""
