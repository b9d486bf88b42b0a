"""python -m s3d_fast: the same as the command s3d-fast."""

import sys

from s3d_fast.commands.main import main

sys.exit(main())
