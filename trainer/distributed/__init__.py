"""The mesh, collectives and sharded tensors."""
