"""``python -m batchmill_ops.simulator``."""

import sys

from .command import main

sys.exit(main())
