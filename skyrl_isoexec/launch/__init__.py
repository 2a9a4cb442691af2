"""Launching a run: what is configured, composed and checked before any process starts, and SkyRL's own experiment.

The only folder that imports hydra, ray and skyrl.
"""
