"""The script of the ranks is also where their cases are described."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
