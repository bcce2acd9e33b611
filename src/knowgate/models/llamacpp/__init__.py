"""llama.cpp in this process: `llamacpp:FILE.gguf`. The library, what runs on it, and the readings made of that."""
