"""Set what cuBLAS needs to be deterministic, for these tests alone; it is read when cuBLAS starts."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
