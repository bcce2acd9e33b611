"""transformers models: one pass that reads, drafts, samples and goes on."""

import os

# read by PyTorch when it first uses a GPU: caches that grow step by step leave holes in blocks of fixed size, and ten
# times the memory in use was held
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
