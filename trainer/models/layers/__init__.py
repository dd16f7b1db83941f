"""Changes of layers: checkpointing, compile, mixers, rotary tables, vision towers."""
