"""The doors: one file per command. A door names the parts of its command and nothing else."""
