"""For these tests alone: what cuBLAS needs to compute the same bits twice, read when it starts."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
