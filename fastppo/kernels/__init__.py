"""Triton kernels and their launchers, a file for each op: tensors in, tensors out, no autograd and no checks, which are
the op's. Imported when a call first takes the "triton" backend: `import fastppo` needs no Triton."""
