"""Data plane: tensors, the model, the KV pool.

``loader`` loads a model (``model``, ``lora``, ``fusion``), ``model_runner`` runs steps on it:
``forward`` (``attention``, ``cuda_graphs``) and ``sampling``.
"""

import logging

# transformers imports torchao if it is installed, which warns each time about torch and about its
# own parts that do not work on this machine. None of these is used here.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
