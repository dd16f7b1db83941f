"""Names that stand for flags: presets, and the names of other trainers with what to write instead."""
