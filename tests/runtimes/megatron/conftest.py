"""The tests and the processes of the ranks find `rank_cases` beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
