"""Models: loading, packed layers, paged cache, forwards.

MKL chooses its kernels by the alignment of memory unless `MKL_CBWR` is set, and buffers are aligned by thread: without
it products differ in their last bits between one thread and two. It is set before the first product of matrices.
"""

import os

os.environ.setdefault("MKL_CBWR", "AVX2")
