"""`python -m benchmarks run` and `python -m benchmarks suites`."""

from __future__ import annotations

import sys

from benchmarks.run import main

sys.exit(main())
