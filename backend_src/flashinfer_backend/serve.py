# SPDX-License-Identifier: Apache-2.0
"""`python -m flashinfer_backend.serve`: starts a server and watches it."""

import sys

from flashinfer_backend.launch.launcher import main

if __name__ == "__main__":
    sys.exit(main())
