"""The flags of all commands: groups, parsing, presets and the table of rules. No torch here."""
