"""Data plane: tensors, the model, the KV pool.

``loader`` loads a model (``model``, ``lora``, ``fusion``), ``model_runner`` runs steps on it:
``forward`` (``attention``, ``cuda_graphs``) and ``sampling``.
"""

import logging

# transformers imports torchao if it is installed. torchao then warns about torch, and about parts
# of torchao that do not work on this machine. This package does not use these parts.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
