"""`python -m torchere.serving`: the command `torchere`."""

import sys

from torchere.serving.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
