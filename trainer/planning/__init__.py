"""Before a run: layouts, memory, the doctor and the page of a model."""
