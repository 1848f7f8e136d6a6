# SPDX-License-Identifier: Apache-2.0
import sys

from flashinfer_backend.serve.launcher import main

sys.exit(main())
