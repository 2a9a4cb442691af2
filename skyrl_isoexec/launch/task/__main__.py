"""`python -m skyrl_isoexec.launch.task +exec=isoexec ...`: train the base checkpoint of a run, print its folder."""

import sys

from skyrl_isoexec.launch.compose import compose_or_exit
from skyrl_isoexec.launch.task.files import ensure_base

if __name__ == "__main__":
    print(ensure_base(compose_or_exit(sys.argv[1:])[0], lambda line: print(line, file=sys.stderr)))
