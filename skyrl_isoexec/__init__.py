"""IsoExec: trainer and rollout engine of one SkyRL run compute the same bits."""
