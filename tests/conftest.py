"""What has to be set before anything of ours, or of Triton's, is imported."""

from __future__ import annotations

import os

# Triton's kernels are interpreted where there is no GPU. Which it is, Triton decides once, when a kernel is defined.
# Tests marked gpu are run with TRITON_INTERPRET=0.
os.environ.setdefault("TRITON_INTERPRET", "1")
