"""The training engine 3d: pipeline, tensor and data parallelism, and its weights for generation."""
