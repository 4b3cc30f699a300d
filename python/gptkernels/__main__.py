"""`python -m gptkernels`."""

import sys

from gptkernels.cli import main

sys.exit(main())
