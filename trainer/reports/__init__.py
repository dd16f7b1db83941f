"""After a run: rows, curves, the report page and the live view."""
