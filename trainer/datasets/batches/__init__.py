"""Global batches, micro-batches, packing and sequence splitting."""
