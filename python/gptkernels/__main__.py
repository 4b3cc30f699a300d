"""The entry point of `python -m gptkernels`."""

import sys

from gptkernels.trainer.cli import main

sys.exit(main())
