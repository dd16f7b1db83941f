"""Tensor and expert parallelism: plans, styles and sharded layers."""
