"""Measurements that need the Hugging Face stack: whole training steps, and Transformers' own expert parallelism."""
