"""What belongs to DeepSpeed only: its configuration, ZeRO stages and AutoTP."""
