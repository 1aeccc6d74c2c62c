"""`python -m megatron_gvpo`, which is also what torchrun starts."""

import sys

from megatron_gvpo.cli import main

sys.exit(main())
