"""`python -m torchere.archiver` is `torch-model-archiver`."""

import sys

from torchere.archiver.cli import main

if __name__ == "__main__":
    sys.exit(main())
