"""`python -m fusedops.cli`: the same as the command `fusedops`."""

import sys

from fusedops.cli import main

sys.exit(main())
