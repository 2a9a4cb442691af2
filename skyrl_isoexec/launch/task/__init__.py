"""The embedded task: a tiny character model learns to add two numbers, on a laptop, with nothing to download.

`prepare` makes what a run of it needs; the other names are where things will be, known without making them.
"""

from skyrl_isoexec.launch.task.files import HELD_OUT_FILE, TRAIN_FILE, base_folder, prepare

__all__ = ["HELD_OUT_FILE", "TRAIN_FILE", "base_folder", "prepare"]
