"""Names that are no flags: the table of other trainers, and what to write instead."""
