"""LLMs run by llama.cpp in this process: the `llamacpp:FILE.gguf` backend and a classifier for exported judges."""
