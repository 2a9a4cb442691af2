"""The embedded task: a tiny character model learns to add two numbers, on a laptop, with nothing to download.

`prepare_checkpoint` and `prepare_data` make what a run of it needs; the other names are where things will be, known
without making them.
"""

from skyrl_isoexec.launch.task.files import (
    DATA,
    HELD_OUT_FILE,
    TRAIN_FILE,
    base_folder,
    forms,
    is_embedded,
    prepare_checkpoint,
    prepare_data,
)

__all__ = [
    "DATA",
    "HELD_OUT_FILE",
    "TRAIN_FILE",
    "base_folder",
    "forms",
    "is_embedded",
    "prepare_checkpoint",
    "prepare_data",
]
