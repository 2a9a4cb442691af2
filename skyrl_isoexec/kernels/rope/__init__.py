"""Rotary position embedding over two halves of the head."""
