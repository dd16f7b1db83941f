"""Finding the module and the step where two runs begin to differ."""
