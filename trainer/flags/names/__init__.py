"""Names that stand for flags: presets, flags of single sets, and the names of other trainers with what to write instead."""
