"""The trainer's side: the unified model inside Megatron-core. Importing this registers and patches nothing."""
