"""Model architectures, assembled from layers."""
