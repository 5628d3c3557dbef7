"""Models: loading, packed layers, ragged cache, forwards.

MKL picks its kernels by the alignment of memory unless `MKL_CBWR` is set, and attention buffers are aligned by thread:
without it the same row differs in its last bits between one thread and two. Set before the first product of matrices.
"""

import os

os.environ.setdefault("MKL_CBWR", "AVX2")
