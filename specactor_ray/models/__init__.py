"""Models: loading, packed layers, paged cache, forwards.

MKL chooses its kernels by the alignment of memory unless `MKL_CBWR` is set, and buffers are aligned by thread: without
it products differ in their last bits between one thread and two. oneDNN's bfloat16 kernels for AMX add in another order
beside more than 32 rows, so a row would depend on its batch; those for AVX512_BF16 do not. Both are set before the
first product of matrices.
"""

import os

os.environ.setdefault("MKL_CBWR", "AVX2")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
