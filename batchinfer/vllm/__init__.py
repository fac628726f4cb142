"""Runs vLLM's client programs unchanged: ``import vllm`` imports batchinfer.

``python -m batchinfer.vllm -m lm_eval run --model vllm ...`` runs a module or a script as
``python`` does; ``install()`` does the same for the Python process that calls it.
"""

from batchinfer.vllm.alias import install

__all__ = ["install"]
