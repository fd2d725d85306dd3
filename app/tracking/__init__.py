"""Send a run's metrics to other systems: Prometheus, TensorBoard, MLflow, Weights & Biases, own trackers."""
