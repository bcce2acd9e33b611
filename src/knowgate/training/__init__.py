"""Train gates and arbiters on label runs, and rerankers on preferences; write them as folders with a model card."""
