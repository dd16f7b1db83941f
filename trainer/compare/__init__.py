"""What compare_backends.py is made of: reading logs, comparing them, reporting, and launching a matrix of runs."""
