"""``python -m hf_laer.cli`` is ``hf-laer``."""

import sys

from .main import main

sys.exit(main())
