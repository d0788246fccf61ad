"""``python -m kvcore``: the command line."""

import sys

from kvcore.cli import main

sys.exit(main())
