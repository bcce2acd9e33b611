"""LLMs run by transformers: hidden states, drafts and samples from one prefill."""

import os

# PyTorch reads this when it first uses a GPU. KV caches grow step by step, which fragments blocks of fixed size.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# transformers imports JAX if it is installed, and JAX would reserve three quarters of the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
