"""Runs programs written for vLLM unchanged: ``import vllm`` imports batchinfer.

``python -m batchinfer.vllm -m lm_eval run --model vllm ...`` runs a module or a script in this way,
with the same arguments as ``python``. ``install()`` makes ``import vllm`` import batchinfer in the
process that calls it.
"""

from batchinfer.vllm.alias import install

__all__ = ["install"]
