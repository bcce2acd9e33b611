"""transformers models: one pass that reads, drafts, samples and goes on."""

import os

# Read by PyTorch when it first uses a GPU: caches that grow step by step leave holes in blocks of fixed size.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# Where JAX is installed, transformers loads it, and it takes three quarters of the card for nothing.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
